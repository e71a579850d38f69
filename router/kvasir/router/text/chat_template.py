"""Messages to prompt text, by the model's own Jinja template.

Owns the sandbox in which a template runs: it can change nothing, reach nothing outside of
what it is given, and stops at its deadline. The deadline holds because a check is compiled
into every loop and macro body, so a runaway template ends instead of living on in a thread
that nobody can stop. Rendering is a pure function of messages, template and clock.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CHECK = "kvasir_check_deadline"

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateFailure:
    """The template cannot render these messages; ``message`` says why, for the client."""

    message: str


class _OutOfTimeError(Exception):
    pass


class ChatTemplate:
    """A compiled chat template.

    Templates see what those of Hugging Face models expect: ``messages``,
    ``add_generation_prompt``, ``bos_token``, ``eos_token``, ``raise_exception``,
    ``strftime_now``, the ``tojson`` filter, and loop controls.

    Raises:
        ValueError: ``source`` is not a Jinja template.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._monotonic = monotonic
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            bos_token=bos_token,
            eos_token=eos_token,
            raise_exception=_raise_exception,
            strftime_now=lambda form: now().strftime(form),
        )
        try:
            tree = _with_checks(environment, source)
            self._template = environment.from_string(tree)
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error

    def render(self, messages: Sequence[Message], *, timeout: float) -> str | TemplateFailure:
        """The prompt that asks for the next assistant message.

        Args:
            messages: each with ``role`` and ``content``.
            timeout: seconds that rendering may take.
        """
        deadline = self._monotonic() + timeout

        def check() -> str:
            if self._monotonic() > deadline:
                raise _OutOfTimeError
            return ""

        variables = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            _CHECK: check,
        }
        try:
            return self._template.render(variables)
        except _OutOfTimeError:
            return TemplateFailure(f"rendering the chat template took longer than {timeout:g} s")
        except jinja2.TemplateError as error:
            return TemplateFailure(f"the chat template refuses these messages: {error.message}")
        except Exception as error:  # noqa: BLE001 - a template can raise whatever Python can
            return TemplateFailure(f"the chat template cannot render these messages: {error}")


def _with_checks(environment: jinja2.Environment, source: str) -> nodes.Template:
    """Parse ``source``, with a call of the deadline check first in every loop and macro."""
    tree = environment.parse(source)
    for repeated in tree.find_all(nodes.Stmt):
        if not isinstance(repeated, nodes.For | nodes.Macro | nodes.CallBlock):
            continue
        call = nodes.Call(nodes.Name(_CHECK, "load"), [], [], None, None)
        check = nodes.ExprStmt(call).set_lineno(repeated.lineno)
        repeated.body.insert(0, check.set_environment(environment))
    return tree


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, *, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML, which changes the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
