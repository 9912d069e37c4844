"""Constraints as requests state them: OpenAI's, vLLM's and SGLang's fields, and the JSON of a `constraint` elsewhere.

Each of these states one constraint:

    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": {...}}}}    OpenAI
    {"response_format": {"type": "json_object"}}
    {"structured_outputs": {"json": {...}}}      vLLM: or regex, choice, grammar, json_object
    {"json_schema": "..."}                       SGLang: or regex, ebnf

The value of `structured_outputs` is also the value of a `constraint` in a row of a JSONL file and in a setting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dlm_bridge.errors import SettingError
from dlm_bridge.structured.compile import compile_constraint
from dlm_bridge.structured.constraint import Constraint
from dlm_bridge.structured.decoding import AutomatonConstraint

# Fields of vLLM's `structured_outputs` about whitespace and its engines: values without an effect here.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False, True),  # whitespace is compact
    "disable_fallback": (False, True),
    "whitespace_pattern": (),
}


@dataclass(frozen=True)
class StatedConstraint:
    """A constraint and the field that states it."""

    constraint: Constraint
    field: str


def read_fields(fields: Mapping[str, Any]) -> StatedConstraint | None:
    """The constraint that a request's fields state; None if they state none.

    Raises:
        SettingError: a field is malformed or unsupported, or two fields state a constraint.
    """
    found = [
        StatedConstraint(constraint, name)
        for name, read in FIELDS.items()
        if fields.get(name) is not None and (constraint := read(name, fields[name])) is not None
    ]
    if len(found) > 1:
        names = [one.field for one in found]
        raise SettingError(names[1], f"excludes `{names[0]}`: a text has one constraint, set one of them")
    return found[0] if found else None


def read_constraint(value: Any, field: str = "constraint") -> Constraint:
    """The constraint of a `Constraint` or of a JSON value as in `structured_outputs`: an object with one of json,
    regex, choice, grammar and json_object. `field`: its name in errors. Raises SettingError."""
    if isinstance(value, Constraint):
        return value
    if not isinstance(value, Mapping):
        raise SettingError(field, 'must be an object such as {"regex": "[0-9]+"} or {"choice": ["yes", "no"]}')
    given = {name: each for name, each in value.items() if each is not None}
    for name in list(given):
        if name in NEUTRAL:
            if given.pop(name) not in NEUTRAL[name]:
                raise SettingError(field, f"`{name}` is not supported: whitespace is compact, and by the schema")
        elif name not in KINDS:
            more = ": use json or tools" if name == "structural_tag" else f": it has {', '.join(KINDS)}"
            raise SettingError(field, f"`{name}` is not supported{more}")
    if len(given) != 1:
        named = " and ".join(f"`{name}`" for name in given) or "none"
        raise SettingError(field, f"must have exactly one of {', '.join(KINDS)}, not {named}")
    ((name, one),) = given.items()
    return KINDS[name](f"{field}.{name}", one)


def compile_for_model(constraint: Constraint, tokenizer: Any, **tokens: Any) -> AutomatonConstraint:
    """A constraint for `Request.constraint`. `tokens`: see `compile_constraint`. Raises SettingError."""
    return AutomatonConstraint(compile_constraint(constraint, tokenizer, **tokens))


def _schema(field: str, value: Any) -> Constraint:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise SettingError(field, "is not valid JSON") from None
    if not isinstance(value, Mapping | bool):
        raise SettingError(field, "must be a JSON schema: an object, or its JSON text")
    return Constraint.json_schema(json.dumps(value, ensure_ascii=False))


def _text(make: Callable[[str], Constraint]) -> Callable[[str, Any], Constraint]:
    def read(field: str, value: Any) -> Constraint:
        if not isinstance(value, str) or not value:
            raise SettingError(field, "must be a text that is not empty")
        return make(value)

    return read


def _choice(field: str, value: Any) -> Constraint:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
        raise SettingError(field, "must be a list of texts that are not empty")
    return Constraint.choice(value)


def _json_object(field: str, value: Any) -> Constraint:
    if value is not True:
        raise SettingError(field, "must be true")
    return Constraint.json_object()


def _response_format(field: str, value: Any) -> Constraint | None:
    """OpenAI's `response_format`, and `text.format` of its Responses API, which has the schema's fields in itself."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint.json_object()
    if kind != "json_schema":
        raise SettingError(field, "type must be text, json_object or json_schema")
    holder = value.get("json_schema", value if "schema" in value else None)
    if not isinstance(holder, Mapping) or "schema" not in holder:
        raise SettingError(field, 'json_schema must be an object such as {"name": "person", "schema": {...}}')
    return _schema(f"{field}.json_schema.schema", holder["schema"])


def _refused(remedy: str) -> Callable[[str, Any], Constraint]:
    def read(field: str, value: Any) -> Constraint:
        raise SettingError(field, f"is not supported: {remedy}")

    return read


KINDS: Mapping[str, Callable[[str, Any], Constraint]] = {
    "json": _schema,
    "regex": _text(Constraint.regex),
    "choice": _choice,
    "grammar": _text(Constraint.grammar),
    "json_object": _json_object,
}
# Fields of a request.
FIELDS: Mapping[str, Callable[[str, Any], Constraint | None]] = {
    "response_format": _response_format,
    "structured_outputs": lambda field, value: read_constraint(value, field),
    "regex": _text(Constraint.regex),
    "json_schema": _schema,
    "ebnf": _text(Constraint.grammar),
    "structural_tag": _refused("use json_schema or tools"),
    **{
        f"guided_{name}": _refused(f"vLLM 0.12 removed it: use structured_outputs with `{name}`")
        for name in ("json", "regex", "choice", "grammar", "json_object")
    },
}
