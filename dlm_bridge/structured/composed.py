"""Languages composed of others: calls of tools, and forms, whose gaps have constraints of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from dlm_bridge.errors import SettingError
from dlm_bridge.structured.constraint import Constraint
from dlm_bridge.structured.languages import (
    Limits,
    Node,
    characters,
    difference,
    optional,
    repeat,
    sequence,
    text,
    union,
)

Language = Callable[[Constraint], Node]  # syntax tree of a constraint
# Of a function without parameters.
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def composed_language(constraint: Constraint, language: Language, limits: Limits) -> Node:
    """Syntax tree of a constraint of the kind "tools" or "form". Raises SettingError for a part that is invalid."""
    spec = json.loads(constraint.text)
    return _tools(spec, language, limits) if constraint.kind == "tools" else _form(spec, language)


def tools_constraint(
    functions: Sequence[tuple[str, Any]], marks: Sequence[str], *, required: bool, several: bool
) -> Constraint:
    """Calls of functions.

    Args:
        functions: names and parameters, a JSON schema or None.
        marks: text before a call, after it, and between two calls.
        required: the text consists of calls. Otherwise they may follow a text that does not contain the mark before a
            call, or be absent.
        several: any number of calls, one after the other; otherwise one.
    """
    spec = {"functions": list(functions), "marks": list(marks), "required": required, "several": several}
    return Constraint("tools", json.dumps(spec, ensure_ascii=False))


def form_constraint(parts: Sequence[str | Constraint]) -> Constraint:
    """Given texts and constrained ones, one after the other."""
    spec = [part if isinstance(part, str) else {"kind": part.kind, "text": part.text} for part in parts]
    return Constraint("form", json.dumps(spec, ensure_ascii=False))


def _tools(spec: dict[str, Any], language: Language, limits: Limits) -> Node:
    begin, end, between = spec["marks"]
    calls = []
    for name, parameters in spec["functions"]:
        schema = NO_PARAMETERS if parameters is None else parameters
        try:
            arguments = language(Constraint.json_schema(schema))
        except SettingError as error:
            raise SettingError("constraint", f"parameters of {name}: {error.reason}") from error
        calls.append(sequence(text(f'{{"name": {json.dumps(name)}, "arguments": '), arguments, text("}")))
    marked = sequence(text(begin), union(*calls), text(end))
    found = repeat(marked, 1, None, text(between)) if spec["several"] else marked
    if spec["required"]:
        return found
    anything = repeat(characters(((0, 0x10FFFF),)))
    unmarked = difference(anything, sequence(anything, text(begin.strip()), anything), limits)
    return sequence(unmarked, optional(found))


def _form(spec: list[Any], language: Language) -> Node:
    parts = [text(part) if isinstance(part, str) else language(Constraint(**part)) for part in spec]
    return sequence(*parts)
