"""JSON schemas: random texts of the automaton are valid by `jsonschema`, and texts of valid values are accepted."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import numpy as np
import pytest

from dlm_bridge.errors import SettingError
from dlm_bridge.structured.compile import byte_automaton
from dlm_bridge.structured.constraint import Constraint
from dlm_bridge.structured.json_text import FORMATS
from dlm_bridge.structured.languages import ByteAutomaton, Limits, distances
from tests.refusals import refused
from tests.structured.tokenizers import ALPHABET, byte_level, compiled


def automaton(schema: Any) -> ByteAutomaton:
    return byte_automaton(Constraint.json_schema(schema), Limits(50_000, time.monotonic() + 60))


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()  # its default separators are the constraint's


def walks(found: ByteAutomaton, count: int, length: int = 300) -> list[bytes]:
    """Random accepted texts."""
    rng = random.Random(0)
    steps = distances(found.transitions, found.accepting)
    members = [np.nonzero(found.classes == each)[0].tolist() for each in range(found.transitions.shape[1])]
    texts = []
    for _ in range(count):
        state, text = 0, bytearray()
        while not (found.accepting[state] and (rng.random() < 0.3 or len(text) > length)):
            row = found.transitions[state]
            options = np.nonzero(row >= 0)[0].tolist()
            if not options:
                break
            if len(text) > length:
                options = [min(options, key=lambda each: steps[row[each]])]
            chosen = rng.choice(options)
            text.append(rng.choice(members[chosen]))
            state = int(row[chosen])
        assert found.accepting[state]
        texts.append(bytes(text))
    return texts


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "x": {}},
    "required": ["name", "age"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}
KINDS = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": "a"}, "v": {"type": "null"}}, "required": ["kind", "v"]},
        {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]},
        {"type": "array", "maxItems": 1},
        {"type": "string", "pattern": "^x"},
        {"type": "string", "pattern": "^y+$"},
    ]
}

# A schema, values that are valid and written, values that are not valid
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (
        PERSON,
        [{"name": 'Zoë 😀 "\\\n', "age": 120}, {"name": "", "age": 0, "x": [1, {"a": None}]}],
        [{"name": "", "age": 121}, {"age": 1}],
    ),
    (TREE, [{"v": 1}, {"v": 1, "next": [{"v": 2, "next": [{"v": 3}, {"v": 4}]}]}], [{"next": []}]),
    (KINDS, [{"kind": "a", "v": None}, {"kind": "c"}, [], "xz", "yy"], [{"kind": "a", "v": 1}, "z", "yx"]),
    ({"type": ["null", "boolean", "number"]}, [None, True, -1.5, 1e30, 0], ["a", [], {}]),
    ({"type": "integer", "minimum": -12, "exclusiveMaximum": 105}, [-12, -9, 0, 7, 99, 104], [-13, 105, 1000, -100]),
    ({"type": "integer", "exclusiveMinimum": 99.5}, [100, 12345678901234567890], [99, -100, 0]),
    ({"type": "integer", "maximum": -3}, [-3, -10, -999], [-2, 0, 3]),
    ({"type": "integer", "multipleOf": 7, "minimum": 10}, [14, 700, 1001], [7, 15, -14]),
    ({"type": "number", "minimum": -1.25, "exclusiveMaximum": 10.5}, [-1.25, -0.5, 0, 3.75, 10.49], [-1.26, 10.5, 11]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.001, 1, 0.9], [0, 1.01, -0.1]),
    ({"type": "number", "minimum": 0.25, "maximum": 0.75}, [0.25, 0.5, 0.75], [0.2, 0.76, 0]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😀\n"], ["a", "abcd"]),
    ({"type": "string", "pattern": "b\\d|^a$", "maxLength": 4}, ["a", "xb1y", "b2"], ["aa", "b", "xxxb1"]),
    ({"type": "string", "pattern": '^[^"\\\\/]+\\.(js|ts)$'}, ["a.js", "é.ts"], ["a.jsx", "/a.js"]),
    (
        {"enum": ["a", 1, None, [1, 2], {"k": True}], "type": ["string", "integer", "array"]},
        ["a", 1, [1, 2]],
        [None, {"k": True}],
    ),
    ({"const": {"a": [1.5, "é"]}}, [{"a": [1.5, "é"]}], [{"a": []}]),
    (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        [[True, False], [True] * 3],
        [[True], [True] * 4],
    ),
    (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "null"}],
            "items": {"type": "string"},
            "minItems": 1,
        },
        [[1], [1, None], [1, None, "a", "b"]],
        [[], [None]],
    ),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [[], [1]], [[1, 2]]),
    (
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 2},
        [["a"], ["a", "c"], ["b", "c"]],
        [["a", "a"], [], ["a", "b", "c"]],
    ),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [7]], [[1, 1]]),
    (
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": "x", "b": 1, "c": 2}, {"ab": 1}],
        [{"b": "x"}, {"a": 1}],
    ),
    (
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"x_a": 1}],
        [{"y": 1}, {"x_a": "b"}],
    ),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, [{"a": 1}, {"b": 1}], [{}]),
    (
        {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
        [{"a": None, "b": None}],
        [{"a": None, "b": None, "c": None}],
    ),
    (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}},
                {"properties": {"a": {"minimum": 3}, "b": {}}, "required": ["a"]},
            ]
        },
        [{"a": 3, "b": 1}],
        [{"a": 2}, {}],
    ),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", 1.5]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["a", "c"], ["b"]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    (
        {
            "type": "object",
            "properties": {"k": {"enum": [1, 2]}, "v": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": 1}}, "required": ["k"]},
            "then": {"required": ["v"]},
            "else": {"properties": {"v": False}},
        },
        [{"k": 1, "v": 0}, {"k": 2}],
        [{"k": 1}, {"k": 2, "v": 0}],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "dependentRequired": {"a": ["b"]}},
        [{}, {"a": 1, "b": 1}, {"c": 1}],
        [{"a": 1}],
    ),
    (
        {"type": "object", "allOf": [{"properties": {"a": {"type": "null"}}}], "unevaluatedProperties": False},
        [{}, {"a": None}],
        [{"b": 1}, {"a": 1}],
    ),
    (
        {"type": "object", "properties": {"a/b~": {"$ref": "#/properties/c"}, "c": {"type": "null"}}},
        [{"a/b~": None, "c": None}],
        [{"a/b~": 1}],
    ),
    (
        {
            "$id": "https://x.org/a.json",
            "$ref": "b.json#/$defs/y",
            "$defs": {"z": {"$id": "b.json", "$defs": {"y": {"type": "null"}}}},
        },
        [None],
        [1],
    ),
    ({"type": "object"}, [{}, {"a": {"b": [1]}}], [[], 1]),
    ({}, [1, "a", [], {"a": [None]}], []),
    (True, [1, {"a": 1}], []),
    (
        {"title": "T", "description": "d", "default": 3, "examples": [1], "format": "custom", "type": "boolean"},
        [True],
        [1],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[str(number) for number in range(len(CASES))])
def test_texts_are_valid_and_texts_of_valid_values_are_accepted(case: tuple[Any, list[Any], list[Any]]) -> None:
    schema, valid, invalid = case
    found = automaton(json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema)
    for text in walks(found, 40):
        validator.validate(json.loads(text))
    for value in valid:
        validator.validate(value)
        assert found.matches(dumps(value)), value
    for value in invalid:
        assert not validator.is_valid(value)
        assert not found.matches(dumps(value)), value


INSTANCES = {
    "date": (["2024-02-29", "1999-12-31"], ["2023-02-29", "2024-13-01", "0000-01-01"]),
    "time": (["23:59:59Z", "00:00:00.5+01:00"], ["24:00:00Z", "12:00"]),
    "date-time": (["2024-02-29T00:00:00Z"], ["2024-02-29"]),
    "duration": (["P1Y2M3DT4H", "PT5M", "P2W"], ["P", "PT", "P1H"]),
    "email": (["a.b@example.org"], ["a@", "a b@c.d"]),
    "hostname": (["a-b.example"], ["-a", "a_b"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "ipv4": (["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "01.0.0.0"]),
    "ipv6": (["::", "::1", "2001:db8::8:800", "1:2:3:4:5:6:7:8"], [":::", "1:2:3:4:5:6:7:8:9", "1::2::3"]),
    "uri": (["https://example.org/a?b=c#d"], ["example.org", "http://a b"]),
    "json-pointer": (["", "/a~0b/0"], ["a", "/~2"]),
    "relative-json-pointer": (["0#", "1/a"], ["/a"]),
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_texts_of_a_format_are_valid_by_it(name: str) -> None:
    schema = {"type": "string", "format": name}
    found = automaton(schema)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for text in walks(found, 40):
        checker.check(json.loads(text), name)  # formats that need another package are valid here
    valid, invalid = INSTANCES.get(name, ([], []))
    assert all(found.matches(dumps(each)) for each in valid)
    assert not any(found.matches(dumps(each)) for each in invalid)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a/b": {"contains": {}}}}, "#/properties/a~1b/contains"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "#/propertyNames"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
        ({"type": "number", "multipleOf": 0.01}, "#/multipleOf"),
        ({"not": {"type": "object"}}, "#/not"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
        ({"if": {"minLength": 2}, "then": {"type": "string"}}, "#/if"),
        ({"$ref": "https://example.org/other.json"}, "#/$ref"),
        ({"$ref": "#/$defs/none"}, "#/$ref"),
        ({"$dynamicRef": "#a"}, "#/$dynamicRef"),
        ({"items": {"type": "string", "pattern": "(?=a)"}}, "#/items/pattern"),
        ({"type": "text"}, "#/type"),
        ({"properties": {"a": 3}}, "#/properties/a"),
        ({"type": "object", "minProperties": 3, "additionalProperties": {"type": "null"}}, "#/minProperties"),
        ({"minLength": -1}, "#/minLength"),
        ({"anyOf": {}}, "#/anyOf"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_pointer(schema: Any, pointer: str) -> None:
    with refused(SettingError, "constraint", f"{pointer}:"):
        automaton(schema)


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "[" * 100_000,
        False,
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"enum": []},
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    ],
)
def test_schemas_without_a_text_are_refused(schema: Any) -> None:
    with refused(SettingError, "constraint"):
        automaton(schema if isinstance(schema, str) else json.dumps(schema))


def test_an_object_has_any_properties_up_to_a_depth() -> None:
    found = byte_automaton(Constraint.json_object(), Limits(50_000, time.monotonic() + 60))
    assert all(isinstance(json.loads(text), dict) for text in walks(found, 40))
    assert found.matches(dumps({"a": {"b": [1, {"c": [True]}]}, "é": None}))
    assert not found.matches(b"[]")
    assert not found.matches(b'{"a":1}')  # compact: one space


def test_tokens_of_a_schema_decode_to_valid_json() -> None:
    pieces = [*ALPHABET, '{"', '":', 'Ġ"', '",', "name", 'name":', "true", "Ġ1", '"}', "ðŁ", "ĺĢ"]
    tokenizer = byte_level(*pieces)
    found = compiled(
        Constraint.json_schema(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 3}, "ok": {"type": "boolean"}},
                "required": ["name"],
            }
        ),
        tokenizer,
    )
    assert found.shortest == len(['{"', 'name":', 'Ġ"', '"}'])
    rng, ids = random.Random(0), found.classes[: len(tokenizer)]
    for _ in range(30):
        state, tokens = 0, []
        while not found.accepting[state]:
            allowed = [i for i in range(3, len(ids)) if found.transitions[state, ids[i]] >= 0]
            if len(tokens) > 20:
                allowed = [min(allowed, key=lambda i: int(found.distances[found.transitions[state, ids[i]]]))]
            tokens.append(rng.choice(allowed))
            state = found.advance(state, tokens[-1:])
        assert set(json.loads(tokenizer.decode(tokens))) >= {"name"}
        assert len(json.loads(tokenizer.decode(tokens))["name"]) <= 3


def test_in_old_drafts_a_reference_hides_the_id_beside_it() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "http://x.org/sibling/base/",
        "definitions": {
            "a": {"$id": "http://x.org/sibling/base/foo.json", "type": "string"},
            "b": {"$id": "foo.json", "type": "number"},
        },
        "allOf": [{"$id": "http://x.org/sibling/", "$ref": "foo.json"}],
    }
    found = automaton(schema)
    assert found.matches(b'"a"')
    assert not found.matches(b"1")
