"""Chat templates: against transformers, in their sandbox, within their time."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from helpers.bundled_tokenizer import IM_START, tokenizer, tokenizer_files
from kvasir.router.text.chat_template import ChatTemplate, TemplateFailure
from kvasir.router.text.tokenizer import ModelTokenizer, TokenizerError

_CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?\n\n"}],
    [
        {"role": "user", "content": "<b>1 & 2</b> {{ x }} 'é☃'"},
        {"role": "assistant", "content": " \tYes."},
        {"role": "user", "content": "<|im_end|>"},
    ],
]
_HARD_TEMPLATE = """{{ bos_token }}
{%- macro show(message) %}
    {% if message.role == 'user' %}[{{ message.content | trim }}]
    {%- else %}({{ message | tojson }}){% endif %}
{% endmacro %}
{% for message in messages %}
    {% if loop.index0 == 9 %}
        {% break %}
    {% endif %}
    {{ show(message) }}{{ eos_token if not loop.last }}
{% endfor %}
{% set ns = namespace(total=0) %}
{% for m in messages %}{% set ns.total = ns.total + m.content | length %}{% endfor %}
{{ ns.total }}{% if add_generation_prompt %}>{% endif %}
"""


def _rendered(template: ChatTemplate | None, messages: list[dict[str, str]]) -> str:
    assert template is not None
    text = template.render(messages, timeout=10)
    assert isinstance(text, str), text
    return text


@pytest.mark.parametrize("messages", _CONVERSATIONS)
@pytest.mark.parametrize("source", [None, _HARD_TEMPLATE], ids=["bundled", "hard"])
def test_renders_and_encodes_as_transformers_does(
    tmp_path: Path, source: str | None, messages: list[dict[str, str]]
) -> None:
    files = dict(tokenizer_files())
    if source is not None:
        files["chat_template.jinja"] = source.encode()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    reference: Any = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ours = ModelTokenizer.from_files(files)
    text = _rendered(ours.template, messages)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == expected
    ids = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.encode(text) == ids


_PREPENDS_BOS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
        "<|im_start|>": {"id": "<|im_start|>", "ids": [IM_START], "tokens": ["<|im_start|>"]}
    },
}


@pytest.mark.parametrize("stated", [True, None], ids=["in the config", "by the post-processor"])
@pytest.mark.parametrize("text", ["Hi", "<|im_start|>Hi", ""])
def test_exactly_one_bos(stated: bool | None, text: str) -> None:
    description = json.loads(tokenizer_files()["tokenizer.json"])
    config: dict[str, Any] = {"bos_token": {"content": "<|im_start|>"}}
    if stated is None:
        description["post_processor"] = _PREPENDS_BOS
    else:
        config["add_bos_token"] = stated
    built = ModelTokenizer.from_files(
        {
            "tokenizer.json": json.dumps(description).encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        }
    )
    ids = built.encode(text)
    assert ids[0] == IM_START
    assert ids.count(IM_START) == 1
    assert built.encode("Hi", add_special_tokens=False)[0] != IM_START


def test_no_bos_for_a_model_that_wants_none() -> None:
    assert IM_START not in tokenizer().encode("Hi")


def _failure(source: str, *, timeout: float = 10) -> str:
    result = ChatTemplate(source).render([{"role": "user", "content": "Hi"}], timeout=timeout)
    assert isinstance(result, TemplateFailure), result
    return result.message


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "refuses"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot render"),
    ],
)
def test_what_a_template_may_not_do(source: str, phrase: str) -> None:
    assert phrase in _failure(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    ],
    ids=["loops", "macros"],
)
def test_a_time_bomb_stops(source: str) -> None:
    assert "longer than 0.05 s" in _failure(source, timeout=0.05)


def test_the_date_comes_from_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 2, 3))
    assert template.render([], timeout=1) == "03 Feb 2026"


def test_a_broken_template_is_refused_with_the_file_s_name() -> None:
    files = {**tokenizer_files(), "chat_template.jinja": b"{% for %}"}
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        ModelTokenizer.from_files(files)
