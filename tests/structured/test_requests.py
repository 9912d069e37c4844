"""Constraints as requests, rows and options state them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlm_bridge.errors import SettingError
from dlm_bridge.structured.constraint import Constraint
from dlm_bridge.structured.requests import read_constraint, read_fields
from tests.refusals import refused

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}, "required": ["b"]}
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "field", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", Constraint.json_object()),
        ({"response_format": OPENAI}, "response_format", Constraint.json_schema(SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},  # of the Responses API
            "response_format",
            Constraint.json_schema(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs", Constraint.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs", Constraint.json_schema(SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs", Constraint.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs", Constraint.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs", Constraint.grammar('start: "a"')),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs", Constraint.json_object()),
        (
            {"structured_outputs": {"regex": "a", "json": None, "disable_any_whitespace": True}},
            "structured_outputs",
            Constraint.regex("a"),
        ),
        ({"regex": "a+", "json_schema": None}, "regex", Constraint.regex("a+")),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", Constraint.json_schema(SCHEMA)),
        ({"ebnf": 'root ::= "a"'}, "ebnf", Constraint.grammar('root ::= "a"')),
        ({"ebnf": 'root ::= "a"', "response_format": {"type": "text"}}, "ebnf", Constraint.grammar('root ::= "a"')),
    ],
)
def test_each_field_states_its_constraint(fields: dict[str, Any], field: str, constraint: Constraint) -> None:
    stated = read_fields(fields)
    assert stated is not None
    assert (stated.field, stated.constraint) == (field, constraint)


def test_the_order_of_properties_is_the_schemas() -> None:
    stated = read_fields({"response_format": OPENAI})
    assert stated is not None
    assert list(json.loads(stated.constraint.text)["properties"]) == ["b", "a"]


def test_fields_that_ask_for_nothing_state_no_constraint() -> None:
    assert read_fields({"response_format": {"type": "text"}, "regex": None}) is None
    assert read_fields({}) is None


@pytest.mark.parametrize(
    ("fields", "field", "named"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "`regex`"),
        ({"response_format": OPENAI, "structured_outputs": {"regex": "a"}}, "structured_outputs", "`response_format`"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"response_format": "json"}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema"),
        ({"structured_outputs": {}}, "structured_outputs", "none"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "`regex` and `choice`"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "tools"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}, "structured_outputs", "compact"),
        ({"structured_outputs": {"color": "red"}}, "structured_outputs", "`color`"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "true"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice", "list"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        ({"regex": ""}, "regex", "empty"),
        ({"regex": 5}, "regex", "text"),
        ({"json_schema": [1]}, "json_schema", "schema"),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
        ({"structural_tag": "{}"}, "structural_tag", "tools"),
    ],
)
def test_a_malformed_field_is_named(fields: dict[str, Any], field: str, named: str) -> None:
    with refused(SettingError, field, named):
        read_fields(fields)


def test_the_constraint_of_a_row_is_as_in_structured_outputs() -> None:
    constraint = Constraint.choice(["yes", "no"])
    assert read_constraint({"choice": ["yes", "no"]}) == constraint
    assert read_constraint(constraint) is constraint
    with refused(SettingError, "constraint", "regex"):
        read_constraint("[0-9]+")
