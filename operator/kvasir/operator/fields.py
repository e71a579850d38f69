"""How objects and single values of the resources are written: text, sizes, durations, sources.

Each annotation here makes one field's check in Python and the same check as CEL for the API
server, from the same pattern, bounds and words, so that a file is refused alike in both places.
Patterns use only what Python's re and RE2 read alike: ASCII classes, no look-around, no ``\\s``.
Lengths bound the cost of a CEL rule, which the API server estimates from them.

Pure. What cannot be read is a PydanticCustomError of type ``kvasir``.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from kvasir.operator.quantity import (
    DURATION_PATTERN,
    QUANTITY_PATTERN,
    parse_bytes,
    parse_duration,
)


class Strict(BaseModel):
    """No conversions: ``replicas: "1"`` and ``replicas: true`` are errors, not one replica."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )


def refuse(message: str) -> PydanticCustomError:
    """An error with exactly this message."""
    # Braces would be read as placeholders of pydantic's message template.
    return PydanticCustomError("kvasir", "{message}", {"message": message})


def rules(*each: tuple[str, str] | tuple[str, str, str]) -> dict[str, Any]:
    """CEL for a schema: (expression, message when it is false[, path of the field to blame])."""
    keys = ("rule", "message", "fieldPath")
    return {"x-kubernetes-validations": [dict(zip(keys, rule, strict=False)) for rule in each]}


def cel_text(text: str) -> str:
    """A CEL literal. Raw, so that patterns stay readable."""
    return f"r'{text}'"


def matches(pattern: str) -> str:
    """CEL: all of ``self``, a string, matches."""
    return f"self.matches({cel_text(f'^(?:{pattern})$')})"


class Written(ABC):
    """Base of the annotations: ``Annotated[float, Duration("1ms", "1h")]``."""

    @abstractmethod
    def read(self, value: object) -> object:
        """The value as Python has it. Raises PydanticCustomError."""

    @abstractmethod
    def schema(self) -> JsonSchemaValue:
        """What a Kubernetes API server checks."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, core: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return self.schema()


@dataclass(frozen=True)
class Text(Written):
    """Text that matches all of ``pattern``; ``kind`` and ``form`` word the refusal."""

    pattern: str
    longest: int
    """Characters."""
    kind: str
    """What the text is, such as "a DNS-1123 label"."""
    form: str
    """The fix."""

    def read(self, value: object) -> str:
        text = _bounded_text(value, self.longest, f'put it in quotes: "{value}"')
        if re.fullmatch(self.pattern, text) is None:
            raise refuse(f"{text!r} {self._refusal}")
        return text

    def schema(self) -> JsonSchemaValue:
        return {
            "type": "string",
            "maxLength": self.longest,
            **rules((matches(self.pattern), self._refusal)),
        }

    @property
    def _refusal(self) -> str:
        return f"is not {self.kind}; {self.form}"


@dataclass(frozen=True)
class Source(Written):
    """Where a model lies: SCHEME://REST, with a form of its own for each scheme."""

    longest: int = 1024

    def read(self, value: object) -> str:
        example = f"write for example {_SOURCES['bundled'][1]}"
        text = _bounded_text(value, self.longest, example)
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in _SOURCES:
            raise refuse(f"{text!r} {_NO_SCHEME}")
        pattern, form = _SOURCES[scheme]
        if re.fullmatch(pattern, rest) is None:
            raise refuse(f"{text!r} {_incomplete(form)}")
        return text

    def schema(self) -> JsonSchemaValue:
        schemes = "|".join(_SOURCES)
        forms = (
            (f"!self.startsWith('{scheme}://') || {matches(f'{scheme}://{rest}')}", form)
            for scheme, (rest, form) in _SOURCES.items()
        )
        return {
            "type": "string",
            "maxLength": self.longest,
            **rules(
                (f"self.matches({cel_text(f'^(?:{schemes})://')})", _NO_SCHEME),
                *((rule, _incomplete(form)) for rule, form in forms),
            ),
        }


_SOURCES = {
    "bundled": (r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?", "bundled://smollm2-135m-instruct"),
    "hf": (
        r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(?:@[A-Za-z0-9_./-]+)?",
        "hf://org/name or hf://org/name@revision",
    ),
    # Visible ASCII but the slash, between slashes.
    "pvc": (r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?:/[!-.0-~]+)+/?", "pvc://claim/path"),
    "file": (r"/[^\x00-\x1f\x7f]+", "file:///absolute/path"),
}
_NO_SCHEME = f"has no known scheme; write one of {', '.join(form for _, form in _SOURCES.values())}"


def _incomplete(form: str) -> str:
    return f"is incomplete or malformed; write {form}"


@dataclass(frozen=True)
class Size(Written):
    """Bytes, written as a Kubernetes quantity, from ``least`` to ``most``."""

    least: str
    most: str

    def read(self, value: object) -> int:
        text = _number_or_text(value, f"must be a size; {_SIZE_FORM}")
        try:
            size = parse_bytes(text)
        except ValueError:
            raise refuse(f"{value!r} {_NOT_A_SIZE}") from None
        if not parse_bytes(self.least) <= size <= parse_bytes(self.most):
            raise refuse(f"{_outside(self.least, self.most)}, got {value!r}")
        return size

    def schema(self) -> JsonSchemaValue:
        amount, text = "quantity(self)", "type(self) == string"
        # Fractions of a byte are rounded up: any part of the first byte allowed is enough.
        below = parse_bytes(self.least) - 1
        within = (
            f"{amount}.isGreaterThan(quantity('{below}')) && "
            f"!{amount}.isGreaterThan(quantity('{self.most}'))"
        )
        well_formed = matches(QUANTITY_PATTERN)
        return {
            "x-kubernetes-int-or-string": True,
            "minimum": parse_bytes(self.least),
            "maximum": parse_bytes(self.most),
            "maxLength": _LONGEST_QUANTITY,
            **rules(
                (f"!({text}) || {well_formed}", _NOT_A_SIZE),
                (f"!({text} && {well_formed}) || ({within})", _outside(self.least, self.most)),
            ),
        }


@dataclass(frozen=True)
class Duration(Written):
    """Seconds, written with their unit, from ``least`` to ``most``."""

    least: str
    most: str

    def read(self, value: object) -> float:
        if not isinstance(value, str):
            raise refuse(f"{value!r} has no unit; {_DURATION_FORM}")
        _bounded_text(value, _LONGEST_DURATION, _DURATION_FORM)
        try:
            seconds = parse_duration(value)
        except ValueError:
            raise refuse(f"{value!r} {_NOT_A_DURATION}") from None
        if not parse_duration(self.least) <= seconds <= parse_duration(self.most):
            raise refuse(f"{_outside(self.least, self.most)}, got {value!r}")
        return seconds

    def schema(self) -> JsonSchemaValue:
        within = (
            f"duration(self) >= duration('{self.least}') && "
            f"duration(self) <= duration('{self.most}')"
        )
        well_formed = matches(DURATION_PATTERN)
        return {
            "type": "string",
            "maxLength": _LONGEST_DURATION,
            **rules(
                (well_formed, _NOT_A_DURATION),
                (f"!{well_formed} || ({within})", _outside(self.least, self.most)),
            ),
        }


@dataclass(frozen=True)
class Amount(Written):
    """A container's amount of a resource: a Kubernetes quantity that is not negative, as written.

    A number with a fraction has to be in quotes: a schema of Kubernetes has no type for both.
    """

    def read(self, value: object) -> str | int:
        amount = _number_or_text(value, f"{value!r} {_NOT_AN_AMOUNT}")
        if isinstance(amount, int):
            valid = 0 <= amount <= _LARGEST_NUMBER
        else:
            valid = re.fullmatch(_AMOUNT_PATTERN, amount) is not None
        if not valid:
            raise refuse(f"{value!r} {_NOT_AN_AMOUNT}")
        return amount

    def schema(self) -> JsonSchemaValue:
        return {
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maximum": _LARGEST_NUMBER,
            "maxLength": _LONGEST_QUANTITY,
            **rules((f"type(self) != string || {matches(_AMOUNT_PATTERN)}", _NOT_AN_AMOUNT)),
        }


_SIZE_FORM = "write a size such as 512Mi, 1Gi or 1.5G"
_NOT_A_SIZE = f"is not a size; {_SIZE_FORM}"
_DURATION_FORM = "write a duration with its unit, such as 500ms, 300s or 5m"
_NOT_A_DURATION = f"is not a duration; {_DURATION_FORM}"
_LONGEST_DURATION = 16
"""Characters. No text of DURATION_PATTERN up to this length overflows a duration of CEL."""

_AMOUNT_PATTERN = (
    r"(?:[0-9]{1,15}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(?:[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)
_NOT_AN_AMOUNT = 'is not an amount; write one such as 2, "0.5", 500m or 4Gi'
_LARGEST_NUMBER = 10**15 - 1
"""As many digits as _AMOUNT_PATTERN allows."""
_LONGEST_QUANTITY = 32
"""Characters."""


def _outside(least: str, most: str) -> str:
    return f"must be from {least} to {most}"


def _bounded_text(value: object, longest: int, fix: str) -> str:
    if not isinstance(value, str):
        raise refuse(f"must be text, got {value!r}; {fix}")
    if len(value) > longest:
        raise refuse(f"has {len(value)} characters; use at most {longest}")
    return value


def _number_or_text(value: object, refusal: str) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise refuse(refusal)
    if isinstance(value, str):
        _bounded_text(value, _LONGEST_QUANTITY, refusal)
    return value
