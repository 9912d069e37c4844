"""Constraints on the text of a request, as a user states them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["regex", "choice", "json_schema", "json_object", "grammar"]


@dataclass(frozen=True)
class Constraint:
    """A language that the text of a request must belong to.

    Two equal constraints have the same compiled automaton for the same tokenizer. Create one with a class method:

        Constraint.regex(r"\\d{4}-\\d{2}-\\d{2}")
        Constraint.choice(["yes", "no"])
        Constraint.json_schema({"type": "object", "properties": {"name": {"type": "string"}}})
        Constraint.json_object()
        Constraint.grammar('start: "a" start | "b"')

    Args:
        kind: which of these it is.
        text: the regular expression, the JSON text of the choices or of the schema, or the grammar.
    """

    kind: Kind
    text: str = ""

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """The texts that the pattern matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Constraint:
        """One of these texts."""
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Constraint:
        """JSON texts that are valid by the schema, with properties in its order and compact whitespace."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object, up to a depth of nesting."""
        return cls("json_object")

    @classmethod
    def grammar(cls, grammar: str) -> Constraint:
        """The texts of a context-free grammar in Lark's or EBNF's notation."""
        return cls("grammar", grammar)
