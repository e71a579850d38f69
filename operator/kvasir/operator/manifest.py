"""Reads a ModelService from YAML, or says everything that is wrong with it at once.

The only way from a file to a ``ModelService``. Each problem is one line, ``path: what is
wrong; the fix``. Plain YAML only: no Python tags, no duplicate keys, one document.
"""

import difflib
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvasir.operator.modelservice import API_VERSION, KIND, ModelService

_LARGEST_FILE = 1024**2
"""Bytes; etcd stores no larger object either."""

_EXAMPLES = {
    "apiVersion": f"apiVersion: {API_VERSION}",
    "kind": f"kind: {KIND}",
    "metadata": "metadata: {name: smollm2}",
    "metadata.name": "name: smollm2",
    "spec": "spec: {model: {source: bundled://smollm2-135m-instruct}}",
    "spec.model": "model: {source: bundled://smollm2-135m-instruct}",
    "spec.model.source": "source: bundled://smollm2-135m-instruct",
}


class ManifestError(Exception):
    """The file holds no valid ModelService. ``problems``: one line each, all of them."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(path: Path) -> ModelService:
    """The ModelService in a file. Raises ManifestError."""
    try:
        content = path.read_bytes() if path.stat().st_size <= _LARGEST_FILE else None
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file; give the path of a ModelService") from None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from None
    if content is None:
        raise ManifestError(f"{path}: larger than 1 MiB; a ModelService is a short YAML file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ManifestError(f"{path}: not a text file; give a ModelService in YAML") from None
    try:
        return parse(text)
    except ManifestError as error:
        raise ManifestError(*(f"{path}: {problem}" for problem in error.problems)) from None


def parse(text: str) -> ModelService:
    """The ModelService in YAML text. Raises ManifestError."""
    document = _single_document(text)
    if not isinstance(document, dict):
        raise ManifestError(
            f"not a mapping but {_describe(document)}; "
            f"a ModelService begins with apiVersion: {API_VERSION}"
        )
    try:
        return ModelService.model_validate(document)
    except ValidationError as error:
        raise ManifestError(*problems_of(error)) from None


def problems_of(error: ValidationError) -> tuple[str, ...]:
    """What is wrong with a ModelService, one line each."""
    details = error.errors(include_url=False)
    return tuple(dict.fromkeys(_problem(detail) for detail in details))


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses what it would otherwise drop silently: repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[tuple[str, str]]()
        for key, _ in node.value:
            # Scalars only; any other key is refused as a field name later.
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                raise ManifestError(
                    f"line {key.start_mark.line + 1}: {key.value} is given twice; remove one"
                )
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _single_document(text: str) -> object:
    try:
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ManifestError(f"{line}not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        first_line = str(error).partition("\n")[0]
        raise ManifestError(f"not valid YAML: {first_line}") from None
    except RecursionError:
        raise ManifestError("not valid YAML: nested too deeply") from None
    except ValueError as error:
        # A scalar that looks like a date or a number but is none, such as 2026-99-99.
        raise ManifestError(f"not valid YAML: {error}; put such text in quotes") from None
    if not documents:
        raise ManifestError(f"empty; a ModelService begins with apiVersion: {API_VERSION}")
    if len(documents) > 1:
        raise ManifestError(f"holds {len(documents)} documents; put one ModelService in each file")
    return documents[0]


def _problem(detail: ErrorDetails) -> str:
    path = [str(part) for part in detail["loc"] if part != "[key]"]
    return f"{'.'.join(path)}: {_explain(detail, path)}"


def _explain(detail: ErrorDetails, path: list[str]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    match kind:
        case "kvasir":
            return str(context["message"])
        case "extra_forbidden":
            return _explain_unknown(path)
        case "missing":
            example = _EXAMPLES.get(".".join(path), f"{path[-1]}: ...")
            return f"required but missing; add '{example}'"
        case "literal_error":
            return _explain_choice(value, re.findall(r"'([^']*)'", context["expected"]))
        case "invalid_key":
            return "field names are text; put the name in quotes or remove it"
        case "string_pattern_mismatch":
            return f"{value!r} is malformed; it must match {context['pattern']}"
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        return f"must be {words} {context[key]}, got {_describe(value)}"
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, got {_describe(value)}"
    return detail["msg"]


_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "string_too_short": ("text of length at least", "min_length"),
    "string_too_long": ("text of length at most", "max_length"),
    "too_long": ("a mapping of length at most", "max_length"),
}
_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (put it in quotes)",
    "dict_type": "a mapping of names to values",
    "model_type": "a mapping of fields",
}


def _describe(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case list():
            return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _explain_choice(value: object, choices: list[str]) -> str:
    if len(choices) == 1:
        return f"must be {choices[0]}, got {_describe(value)}"
    near = _nearest(value, choices) if isinstance(value, str) else None
    hint = f"; did you mean {near}?" if near else ""
    return f"must be one of {', '.join(choices)}; got {_describe(value)}{hint}"


def _explain_unknown(path: list[str]) -> str:
    *parents, name = path
    siblings = list(_fields(_model_at(parents)))
    if near := _nearest(name, siblings):
        return f"unknown field; did you mean {near}?"
    if elsewhere := [known for known in _all_paths(ModelService) if known[-1] == name]:
        return f"unknown field here; it belongs at {' or '.join(map('.'.join, elsewhere))}"
    return f"unknown field; the fields here are {', '.join(siblings)}"


def _nearest(name: str, choices: list[str]) -> str | None:
    plain = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower().replace("_", ""), plain, n=1, cutoff=0.7)
    return plain[found[0]] if found else None


def _fields(model: type[BaseModel]) -> Mapping[str, type[BaseModel] | None]:
    """YAML name of each field, with the model of its value if that is one."""
    return {
        field.alias or name: _nested(field.annotation) for name, field in model.model_fields.items()
    }


def _nested(annotation: object) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _model_at(path: list[str]) -> type[BaseModel]:
    model: type[BaseModel] = ModelService
    for name in path:
        nested = _fields(model)[name]
        assert nested is not None, f"{name} in {model.__name__} has fields"  # noqa: S101 - invariant
        model = nested
    return model


def _all_paths(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    for name, nested in _fields(model).items():
        yield (name,)
        if nested is not None:
            yield from ((name, *rest) for rest in _all_paths(nested))
