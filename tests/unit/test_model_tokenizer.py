"""Tokenizer files made from GGUF metadata, against transformers' tokenizers."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers, processors

from helpers.models import BUNDLED_FILE, bundled_folder, save_tiny
from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.fields import Fields
from kvasir.worker.model.tokenizer_files import from_folder, from_gguf

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "it's we'll they'd I'M DON'T",
    "  leading and trailing   ",
    "tabs\tand\nnew\n\n\nlines\r\n",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';",
    "1234567890 3.14159 1,000,000 v2.0.1 0x1F",
    "café naïve Ünïcödé ß Ærø",
    "日本語のテキスト 中文 한국어",
    "Привет мир, как дела?",
    "مرحبا بالعالم",
    "emoji 👩‍👩‍👧‍👦 🚀🔥 ❤️",
    "e\u0301 \u00a0nbsp\u200bzero\ufeff \ufffd",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>a<file_sep>b<gh_stars>5",
    "<|im_start|><|im_start|> <|im_end|>text<|im_end|",
    "math: ∑ᵢ xᵢ ≤ ∫ f(x) dx → ∞",
    "a" * 300,
    "\\ / | ` ~ @ # $ % ^ & * ( ) _ + = { } [ ] : ; \" ' < > ?",
    "\x00\x01\x7f control",
)
DIGIT_TEXTS = ("col  1   22\n    3 apples\t4", "x² ½ Ⅷ ٣٤٥ १२३")
"""Several spaces before digits, and digits beyond ASCII: where it matters that this model cuts
every digit off before it merges."""


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    reader = GGUFReader(bundled_folder() / BUNDLED_FILE)
    return {key: field.contents() for key, field in reader.fields.items()}


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(bundled_folder()), gguf_file=BUNDLED_FILE)


def test_tokens_equal_those_of_transformers(metadata: dict[str, Any], reference: Any) -> None:
    ours = Tokenizer.from_buffer(from_gguf(Fields(metadata, "x.gguf"))["tokenizer.json"])
    for text in TEXTS:
        expected = reference(text).input_ids
        assert ours.encode(text).ids == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == reference.decode(expected)


def test_digits_are_cut_off_first_as_the_model_was_trained(
    metadata: dict[str, Any], reference: Any
) -> None:
    """transformers ignores ``tokenizer.ggml.pre``; given smollm's rule it agrees here too."""
    ours = Tokenizer.from_buffer(from_gguf(Fields(metadata, "x.gguf"))["tokenizer.json"])
    plain = Tokenizer.from_str(reference.backend_tokenizer.to_str())
    for text in DIGIT_TEXTS:
        assert ours.encode(text).ids != plain.encode(text).ids, text
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in (*TEXTS, *DIGIT_TEXTS):
        assert ours.encode(text).ids == plain.encode(text).ids, text


def test_special_tokens_and_template(metadata: dict[str, Any], reference: Any) -> None:
    files = from_gguf(Fields(metadata, "x.gguf"))
    ours = Tokenizer.from_buffer(files["tokenizer.json"])
    assert json.loads(files["tokenizer_config.json"]) == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "add_bos_token": False,
    }
    assert files["chat_template.jinja"].decode() == reference.chat_template
    text = "<|im_start|>a<|im_end|>"
    assert ours.decode(ours.encode(text).ids) == "a"
    assert ours.get_vocab_size() == 49152


def test_bos_comes_once(metadata: dict[str, Any]) -> None:
    files = from_gguf(Fields({**metadata, "tokenizer.ggml.add_bos_token": True}, "x.gguf"))
    ours = Tokenizer.from_buffer(files["tokenizer.json"])
    assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is True
    assert ours.encode("hello").ids[:1] == [1]
    assert ours.encode("hello").ids.count(1) == 1
    assert ours.encode("hello", add_special_tokens=False).ids.count(1) == 0


@pytest.mark.parametrize(("pre", "digits"), [("qwen2", r"\p{N}"), ("llama-bpe", r"\p{N}{1,3}")])
def test_other_byte_level_families(metadata: dict[str, Any], pre: str, digits: str) -> None:
    """Words are cut as transformers' own tokenizer of the family cuts them."""
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges: Any = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    ours = Tokenizer.from_buffer(
        from_gguf(Fields({**metadata, "tokenizer.ggml.pre": pre}, "x.gguf"))["tokenizer.json"]
    )
    description = json.loads(theirs.to_str())["pre_tokenizer"]
    pattern = description["pretokenizers"][0]["pattern"]
    pattern["Regex"] = pattern["Regex"].replace(r"|\p{N}|", f"|{digits}|")
    rebuilt = json.loads(theirs.to_str()) | {"pre_tokenizer": description}
    theirs = Tokenizer.from_str(json.dumps(rebuilt))
    assert theirs.pre_tokenizer is not None
    assert ours.pre_tokenizer is not None
    for text in (*TEXTS, *DIGIT_TEXTS):
        expected = theirs.pre_tokenizer.pre_tokenize_str(text)
        assert ours.pre_tokenizer.pre_tokenize_str(text) == expected, text


def test_unknown_tokenizers_are_refused(metadata: dict[str, Any]) -> None:
    for changes in ({"tokenizer.ggml.pre": "other"}, {"tokenizer.ggml.model": "llama"}):
        with pytest.raises(ModelError, match="is not supported; use one of gpt2 with"):
            from_gguf(Fields({**metadata, **changes}, "x.gguf"))


def test_a_folders_files_pass_through(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w1 $A", special_tokens=[("w1", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "w1", "lstrip": False},
        "eos_token": "w2",
        "chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}],
        "model_max_length": 77,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = from_folder(tmp_path)
    assert files["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()
    assert files["chat_template.jinja"] == b"D"
    found = json.loads(files["tokenizer_config.json"])
    assert (found["bos_token"], found["eos_token"]) == ("w1", "w2")
    assert found["add_bos_token"] is True
    assert found["model_max_length"] == 77
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert from_folder(tmp_path)["chat_template.jinja"] == b"from the file"


def test_a_folder_without_template_or_config(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    files = from_folder(tmp_path)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert json.loads(files["tokenizer_config.json"]) == {
        "bos_token": None,
        "eos_token": None,
        "add_bos_token": False,
    }
