"""JSON schemas as regular languages.

A schema becomes a list of alternatives (disjunctive normal form): `$ref`, `allOf`, `anyOf`, `oneOf`, `not`, `if` and
`dependentRequired` are resolved, and each alternative is a plain set of keywords of types, values, strings, numbers,
arrays and objects. An alternative writes texts that are valid by it. Where a schema also excludes something (`oneOf`,
`not`, `if`), a proof is needed that no text of the alternative is valid by what is excluded: disjoint types, values,
ranges, patterns or properties. Without a proof the schema is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import reduce
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from dlm_bridge.structured.json_text import (
    ANY_CHARACTER,
    COLON,
    COMMA,
    FORMATS,
    QUOTE,
    any_object,
    any_value,
    constant,
    dumps,
    format_content,
    free_string,
    integers,
    number,
    numbers,
    plain_string,
    string_character,
)
from dlm_bridge.structured.languages import (
    EMPTY,
    NOTHING,
    ByteAutomaton,
    Limits,
    Node,
    automaton_node,
    determinize,
    difference,
    entries,
    intersection,
    repeat,
    sequence,
    text,
    union,
)
from dlm_bridge.structured.regex import RegexError, parse_regex, search

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_KEYWORDS = {
    "string": ("least_length", "most_length", "patterns", "formats"),
    "number": ("low", "high", "multiples"),
    "array": ("prefix", "items", "least_items", "most_items", "unique"),
    "object": ("properties", "required", "additional", "pattern_properties", "least_properties", "most_properties"),
}
# Keywords without an effect on what is valid, or that other keywords read.
_IGNORED = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "$schema",
        "$id",
        "id",
        "$comment",
        "$defs",
        "definitions",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$anchor",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "then",
        "else",
        "minContains",
        "maxContains",
        "$recursiveAnchor",
    ]
)
_REFUSED = frozenset(["contains", "propertyNames", "$dynamicRef", "$recursiveRef", "$dynamicAnchor"])
_MAX_ALTERNATIVES = 300
_MAX_MULTIPLE = 2000

Part = tuple[Any, str]  # a schema and its JSON pointer
Parts = tuple[Part, ...]  # all of them hold


class SchemaError(ValueError):
    """A schema is invalid or not supported.

    Args:
        pointer: JSON pointer to the keyword or the schema at fault.
        reason: the problem.
    """

    def __init__(self, pointer: str, reason: str) -> None:
        self.pointer, self.reason = pointer, reason
        super().__init__(f"{pointer or '#'}: {reason}")


@dataclass(frozen=True)
class Nesting:
    """How deep and how long values are written. Texts stay valid, but not every valid value has one.

    Args:
        references: recursive references that lie in each other.
        free: levels of arrays and objects of values that the schema leaves open.
        characters: most characters of a string with `maxLength`, if its `minLength` allows so few.
        items: most items of an array with `maxItems`, if its `minItems` allows so few.
    """

    references: int
    free: int
    characters: int = sys.maxsize
    items: int = sys.maxsize


# From the largest: a schema that needs too many states is compiled again with the next one.
NESTINGS = (Nesting(5, 2), Nesting(3, 1, 256, 64), Nesting(2, 1, 128, 16), Nesting(1, 0, 64, 8))


@dataclass(frozen=True)
class _Alternative:
    """Keywords that all hold. None: not given."""

    pointer: str
    level: int = 0  # recursive references around it
    types: frozenset[str] | None = None
    values: tuple[Any, ...] | None = None
    low: tuple[Decimal, bool] | None = None  # bound, excluded
    high: tuple[Decimal, bool] | None = None
    multiples: tuple[tuple[Decimal, str], ...] = ()
    least_length: int | None = None
    most_length: int | None = None
    patterns: tuple[tuple[str, str], ...] = ()  # with their pointers
    formats: tuple[tuple[str, str], ...] = ()
    prefix: tuple[Parts, ...] = ()
    items: Parts | None = None
    least_items: int | None = None
    most_items: int | None = None
    unique: tuple[str, ...] = ()  # pointers of `uniqueItems`
    properties: dict[str, Parts] | None = None
    required: tuple[str, ...] = ()
    additional: Parts | None = None
    pattern_properties: tuple[tuple[str, Parts], ...] = ()
    least_properties: int | None = None
    most_properties: int | None = None
    excluded: tuple[tuple[_Alternative, str], ...] = ()  # with the pointer of the keyword that excludes it
    refused: tuple[str, ...] = ()  # pointers of keywords that are not supported

    def given(self, kind: str) -> bool:
        """A keyword of this type is given."""
        return any(getattr(self, name) not in (None, ()) for name in _KEYWORDS[kind])

    def written_types(self) -> frozenset[str]:
        """Types of the values that are written: without `type`, those of the other keywords."""
        if self.types is not None:
            return self.types
        return frozenset(kind for kind in _KEYWORDS if self.given(kind)) or TYPES


@dataclass
class SchemaCompiler:
    """Compiler of one schema.

    Args:
        schema: the schema, as parsed JSON.
        limits: of the automata of patterns.
        nesting: how deep recursion and free values go.
    """

    schema: Any
    limits: Limits
    nesting: Nesting = NESTINGS[0]
    _bases: dict[int, str] = field(default_factory=dict)  # base URI of each schema, by identity
    _named: dict[str, Part] = field(default_factory=dict)  # schemas by URI
    _nodes: dict[tuple[tuple[int, ...], int], Node] = field(default_factory=dict)
    _patterns: dict[str, tuple[Node, ByteAutomaton]] = field(default_factory=dict)
    _recursive: dict[str, bool] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)  # what is known by identity

    def compile(self) -> Node:
        """Syntax tree of the JSON texts. Raises SchemaError."""
        self._index(self.schema, "", "", 0)
        return self._node(((self.schema, "#"),), 0)

    # References

    def _index(self, schema: Any, pointer: str, base: str, depth: int) -> None:
        if depth > 200:
            raise SchemaError(f"#{pointer}", "nested deeper than 200 levels")
        if isinstance(schema, dict):
            name = schema.get("$id", schema.get("id"))
            if isinstance(name, str) and not ("$ref" in schema and self._is_old()):
                base = urljoin(base, name)
                self._named.setdefault(base.rstrip("#"), (schema, f"#{pointer}"))
            anchor = schema.get("$anchor")
            if isinstance(anchor, str):
                self._named.setdefault(f"{base.rstrip('#')}#{anchor}", (schema, f"#{pointer}"))
            self._bases[id(schema)] = base
            for key, value in schema.items():
                if key not in ("enum", "const", "default", "examples", "example"):
                    self._index(value, f"{pointer}/{_escaped(key)}", base, depth + 1)
        elif isinstance(schema, list):
            for number_, value in enumerate(schema):
                self._index(value, f"{pointer}/{number_}", base, depth + 1)

    def _is_old(self) -> bool:
        """The draft is 7 or earlier, in which `$ref` hides what stands beside it."""
        named = self.schema.get("$schema") if isinstance(self.schema, dict) else None
        return isinstance(named, str) and "/draft-0" in named

    def _resolve(self, reference: Any, base: str, pointer: str) -> Part:
        if not isinstance(reference, str):
            raise SchemaError(pointer, "a reference must be a string")
        uri = urljoin(base, reference) if base else reference
        if uri in self._named:
            return self._named[uri]
        document, fragment = urldefrag(uri)
        if not document or document == base.rstrip("#") or document in self._named:
            root, start = self._named.get(document, (self.schema, "#")) if document else (self.schema, "#")
            found = _at(root, unquote(fragment))
            if found is not None:
                return found, f"{start}{fragment}" if fragment else start
        raise SchemaError(pointer, f"the reference {reference!r} leads to no schema of this document")

    def _is_recursive(self, target: Part) -> bool:
        """A schema contains a reference that leads to itself, at whatever distance."""
        schema, pointer = target
        if pointer not in self._recursive:
            seen: set[int] = set()
            waiting = [schema]
            self._recursive[pointer] = False
            while waiting:
                for found in self._references(waiting.pop()):
                    if found is schema:
                        self._recursive[pointer] = True
                    if id(found) not in seen:
                        seen.add(id(found))
                        waiting.append(found)
        return self._recursive[pointer]

    def _references(self, schema: Any) -> Iterator[Any]:
        """Schemas that references inside of a schema lead to."""
        waiting = [schema]
        while waiting:
            each = waiting.pop()
            if isinstance(each, dict):
                if isinstance(each.get("$ref"), str):
                    with suppress(SchemaError):  # it is reported where it is used
                        yield self._resolve(each["$ref"], self._bases.get(id(each), ""), "")[0]
                waiting += [v for k, v in each.items() if k not in ("$defs", "definitions", "enum", "const")]
            elif isinstance(each, list):
                waiting += each

    # Alternatives

    def _alternatives(self, parts: Parts, level: int, checking: bool = False) -> list[_Alternative]:
        """Alternatives of the conjunction of schemas. `checking`: beyond the depth of recursion anything is valid, as
        a proof needs it, else nothing is."""
        lists = [self._expand(schema, pointer, level, checking) for schema, pointer in parts]
        return self._all_of(lists, parts[0][1])

    def _all_of(self, lists: Sequence[list[_Alternative]], pointer: str) -> list[_Alternative]:
        result = [_Alternative(pointer)]
        for each in lists:
            result = [m for a in result for b in each if (m := self._merged(a, b)) is not None]
            if len(result) > _MAX_ALTERNATIVES:
                raise SchemaError(pointer, f"more than {_MAX_ALTERNATIVES} combinations of alternatives")
        return result

    def _expand(self, schema: Any, pointer: str, level: int, checking: bool) -> list[_Alternative]:
        self.limits.check_time()
        if schema is True or schema == {}:
            return [_Alternative(pointer, level)]
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise SchemaError(pointer, "a schema must be an object or a boolean")
        lists = []
        if "$ref" in schema:
            at = f"{pointer}/$ref"
            target = self._resolve(schema["$ref"], self._bases.get(id(schema), ""), at)
            deeper = level + self._is_recursive(target)
            if deeper > self.nesting.references:
                return [_Alternative(pointer, level)] if checking else []
            if target[0] is schema:
                raise SchemaError(at, "the reference leads to itself")
            lists.append(self._expand(*target, deeper, checking))
        lists.append([self._plain(schema, pointer, level)])
        for number_, each in enumerate(_list(schema, "allOf", pointer)):
            lists.append(self._expand(each, f"{pointer}/allOf/{number_}", level, checking))
        if "anyOf" in schema:
            branches = self._branches(schema, "anyOf", pointer, level, checking)
            lists.append([each for branch in branches for each in branch])
        if "oneOf" in schema:
            branches = self._branches(schema, "oneOf", pointer, level, checking)
            lists.append(self._one_of(branches, schema["oneOf"], f"{pointer}/oneOf", level))
        if "not" in schema:
            lists += self._unmet(schema["not"], f"{pointer}/not", level)
        if "if" in schema and ("then" in schema or "else" in schema):
            lists.append(self._conditional(schema, pointer, level, checking))
        lists += self._dependent(schema, pointer, level, checking)
        result = self._all_of(lists, pointer)
        # Only what the schema itself names is written, so the unevaluated part is what is additional.
        for keyword, name in (("unevaluatedProperties", "additional"), ("unevaluatedItems", "items")):
            if keyword in schema and schema[keyword] is not True:
                part = ((schema[keyword], f"{pointer}/{keyword}"),)
                result = [
                    replace(each, **{name: part}) if getattr(each, name) is None else each  # type: ignore[arg-type]
                    for each in result
                ]
        return result

    def _branches(
        self, schema: dict[str, Any], keyword: str, pointer: str, level: int, checking: bool
    ) -> list[list[_Alternative]]:
        return [
            self._expand(each, f"{pointer}/{keyword}/{number_}", level, checking)
            for number_, each in enumerate(_list(schema, keyword, pointer))
        ]

    def _one_of(
        self, branches: list[list[_Alternative]], schemas: list[Any], pointer: str, level: int
    ) -> list[_Alternative]:
        excluded = [self._excluded(each, pointer, level) for each in schemas]
        result = []
        for number_, branch in enumerate(branches):
            others = tuple(e for i, each in enumerate(excluded) if i != number_ for e in each)
            result += [replace(each, excluded=each.excluded + others) for each in branch]
        return result

    def _excluded(self, schema: Any, pointer: str, level: int) -> tuple[tuple[_Alternative, str], ...]:
        return tuple((each, pointer) for each in self._expand(schema, pointer, level, checking=True))

    def _conditional(self, schema: dict[str, Any], pointer: str, level: int, checking: bool) -> list[_Alternative]:
        condition = self._expand(schema["if"], f"{pointer}/if", level, checking)
        then = self._expand(schema.get("then", True), f"{pointer}/then", level, checking)
        otherwise = self._expand(schema.get("else", True), f"{pointer}/else", level, checking)
        unmet = self._unmet(schema["if"], f"{pointer}/if", level)
        return self._all_of([condition, then], pointer) + self._all_of([*unmet, otherwise], pointer)

    def _unmet(self, schema: Any, pointer: str, level: int) -> list[list[_Alternative]]:
        """The schema does not hold. An object lacks a required property, or the value of a property is not valid."""
        lists = []
        for each, at in self._excluded(schema, pointer, level):
            alternatives = []
            for name in each.required:
                alternatives.append(_Alternative(pointer, level, properties={name: ((False, at),)}))
            for name, parts in (each.properties or {}).items():
                negated = {"not": {"allOf": [part for part, _ in parts]}}
                self._kept.append(negated)
                alternatives.append(
                    _Alternative(pointer, level, required=(name,), properties={name: ((negated, at),)})
                )
            lists.append(alternatives or [_Alternative(pointer, level, excluded=((each, at),))])
        return lists

    def _dependent(self, schema: dict[str, Any], pointer: str, level: int, checking: bool) -> list[list[_Alternative]]:
        """`dependentRequired` and `dependentSchemas`: a property is absent, or what depends on it holds."""
        lists = []
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, value in _object(schema, keyword, pointer).items():
                at = f"{pointer}/{keyword}/{_escaped(name)}"
                without = _Alternative(pointer, level, properties={name: ((False, at),)})
                if isinstance(value, list):
                    present = [_Alternative(pointer, level, required=(name, *value))]
                else:
                    found = self._expand(value, at, level, checking)
                    present = self._all_of([[_Alternative(pointer, level, required=(name,))], found], pointer)
                lists.append([*present, without])
        return lists

    def _plain(self, schema: dict[str, Any], pointer: str, level: int) -> _Alternative:
        """Keywords of one schema that apply other schemas to children or none."""

        def parts(value: Any, *path: str) -> Parts:
            return ((value, "/".join([pointer, *map(_escaped, path)])),)

        values = schema.get("enum")
        if values is not None and not isinstance(values, list):
            raise SchemaError(f"{pointer}/enum", "it must be an array")
        if "const" in schema:
            kept = [schema["const"]]
            values = kept if values is None else [each for each in values if _same(each, kept[0])]
        patterns = ((schema["pattern"], f"{pointer}/pattern"),) if "pattern" in schema else ()
        named = schema.get("format")
        formats = ((named, f"{pointer}/format"),) if isinstance(named, str) and named in FORMATS else ()
        items, prefix = schema.get("items"), schema.get("prefixItems", [])
        item_parts = None if items is None else parts(items, "items")
        prefix_parts = tuple(parts(each, "prefixItems", str(i)) for i, each in enumerate(prefix))
        if isinstance(items, list):  # until draft 2019-09
            prefix_parts = tuple(parts(each, "items", str(i)) for i, each in enumerate(items))
            following = schema.get("additionalItems")
            item_parts = None if following is None else parts(following, "additionalItems")
        properties, found = None, _object(schema, "properties", pointer)
        if "properties" in schema:
            properties = {name: parts(each, "properties", name) for name, each in found.items()}
        required = schema.get("required", ())
        if not isinstance(required, list | tuple):
            required = ()
        required = [
            *required,
            *(k for k, v in found.items() if isinstance(v, dict) and v.get("required") is True),
        ]  # draft 3
        additional = schema.get("additionalProperties")
        patterned = _object(schema, "patternProperties", pointer)
        unique = (f"{pointer}/uniqueItems",) if schema.get("uniqueItems") is True else ()
        multiple = _decimal(schema, "multipleOf", pointer)
        return _Alternative(
            pointer,
            level,
            types=_types(schema, pointer),
            values=None if values is None else tuple(values),
            low=_bound(schema, "minimum", "exclusiveMinimum", pointer),
            high=_bound(schema, "maximum", "exclusiveMaximum", pointer),
            multiples=((multiple, f"{pointer}/multipleOf"),) if multiple is not None else (),
            least_length=_count(schema, "minLength", pointer),
            most_length=_count(schema, "maxLength", pointer),
            patterns=patterns,
            formats=formats,
            prefix=prefix_parts,
            items=item_parts,
            least_items=_count(schema, "minItems", pointer),
            most_items=_count(schema, "maxItems", pointer),
            unique=unique,
            properties=properties,
            required=tuple(dict.fromkeys(required)),
            additional=None if additional is None or additional is True else parts(additional, "additionalProperties"),
            pattern_properties=tuple(
                (name, parts(each, "patternProperties", name)) for name, each in patterned.items()
            ),
            least_properties=_count(schema, "minProperties", pointer),
            most_properties=_count(schema, "maxProperties", pointer),
            refused=tuple(f"{pointer}/{keyword}" for keyword in schema if keyword in _REFUSED),
        )

    def _merged(self, a: _Alternative, b: _Alternative) -> _Alternative | None:
        """Both hold; None if no value can satisfy both."""
        types = a.types if b.types is None else b.types if a.types is None else _common(a.types, b.types)
        values = a.values if b.values is None else b.values
        if a.values is not None and b.values is not None:
            values = tuple(each for each in a.values if any(_same(each, other) for other in b.values))
        if types == frozenset() or values == ():
            return None
        if (a.pattern_properties and (b.additional or b.pattern_properties)) or (
            b.pattern_properties and a.additional
        ):
            at = (a.pattern_properties or b.pattern_properties)[0][1][0][1]
            raise SchemaError(at, "patternProperties cannot be combined with another schema's keywords for properties")
        properties = None
        if a.properties is not None or b.properties is not None:
            properties = {}
            for name in [*(a.properties or ()), *(b.properties or ())]:
                properties[name] = _joined(self._property(a, name), self._property(b, name))
        prefix = tuple(
            _joined(_item(a, position), _item(b, position)) for position in range(max(len(a.prefix), len(b.prefix)))
        )
        return _Alternative(
            a.pointer if b.pointer.startswith(a.pointer) else b.pointer,
            max(a.level, b.level),
            types=types,
            values=values,
            low=max(filter(None, (a.low, b.low)), default=None),
            high=min(filter(None, (a.high, b.high)), key=lambda bound: (bound[0], not bound[1]), default=None),
            multiples=a.multiples + b.multiples,
            least_length=_most(a.least_length, b.least_length),
            most_length=_least(a.most_length, b.most_length),
            patterns=tuple({each[0]: each for each in a.patterns + b.patterns}.values()),
            formats=tuple({each[0]: each for each in a.formats + b.formats}.values()),
            prefix=prefix,
            items=_joined(a.items or (), b.items or ()) or None,
            least_items=_most(a.least_items, b.least_items),
            most_items=_least(a.most_items, b.most_items),
            unique=a.unique + b.unique,
            properties=properties,
            required=tuple(dict.fromkeys(a.required + b.required)),
            additional=_joined(a.additional or (), b.additional or ()) or None,
            pattern_properties=a.pattern_properties + b.pattern_properties,
            least_properties=_most(a.least_properties, b.least_properties),
            most_properties=_least(a.most_properties, b.most_properties),
            excluded=a.excluded + b.excluded,
            refused=a.refused + b.refused,
        )

    def _property(self, alternative: _Alternative, name: str) -> Parts:
        """Schemas of a property; none if any value is valid."""
        parts: Parts = (alternative.properties or {}).get(name, ())
        matching = [
            each for pattern, each in alternative.pattern_properties if self._matches(pattern, name, each[0][1])
        ]
        for each in matching:
            parts = _joined(parts, each)
        if not matching and name not in (alternative.properties or {}):
            parts = alternative.additional or ()
        return parts

    # Texts

    def _node(self, parts: Parts, level: int) -> Node:
        """Syntax tree of the values that are valid by all parts."""
        key = (tuple(id(schema) for schema, _ in parts), level)
        if key not in self._nodes:
            self._kept.append(parts)
            if not parts:
                self._nodes[key] = any_value(self.nesting.free)
            else:
                found = self._alternatives(parts, level)
                self._nodes[key] = union(*map(self._alternative, found))
        return self._nodes[key]

    def _alternative(self, alternative: _Alternative) -> Node:
        if alternative.refused:
            raise SchemaError(alternative.refused[0], "this keyword is not supported")
        alternative = self._disjoint(alternative)
        if alternative.values is not None:
            return self._values(alternative)
        types = alternative.written_types()
        if types == TYPES and not any(map(alternative.given, _KEYWORDS)):
            return any_value(self.nesting.free)
        nodes = {
            "null": lambda: text("null"),
            "boolean": lambda: union(text("true"), text("false")),
            "integer": lambda: self._number(alternative, whole=True) if "number" not in types else NOTHING,
            "number": lambda: self._number(alternative, whole=False),
            "string": lambda: self._string(alternative),
            "array": lambda: self._array(alternative),
            "object": lambda: self._object(alternative),
        }
        return union(*(node() for name, node in nodes.items() if name in types))

    def _values(self, alternative: _Alternative) -> Node:
        assert alternative.values is not None
        rest = replace(alternative, values=None, excluded=())
        values = [each for each in alternative.values if _has_type(each, rest.types)]
        if any(map(rest.given, _KEYWORDS)):
            kinds = {_kind(each) for each in values}
            values = [each for each in values if not self._rejects(rest, each)]
            if kinds & {kind for kind in ("array", "object") if rest.given(kind)} or rest.multiples:
                # What `_rejects` does not decide: only values whose text the rest writes.
                automaton = determinize(self._alternative(rest), self.limits)
                values = [each for each in values if automaton.matches(_text(each, rest.pointer))]
        for each in values:
            _text(each, alternative.pointer)
        return union(*map(constant, values))

    def _number(self, alternative: _Alternative, whole: bool) -> Node:
        low, high = alternative.low, alternative.high
        for multiple, pointer in alternative.multiples:
            if multiple != multiple.to_integral_value() or not 0 < multiple <= _MAX_MULTIPLE:
                raise SchemaError(pointer, f"only whole numbers up to {_MAX_MULTIPLE} are supported")
        if whole or alternative.multiples:
            least = None if low is None else _whole(*low, up=True)
            most = None if high is None else _whole(*high, up=False)
            node = integers(least, most)
            for multiple, _ in alternative.multiples:
                if multiple != 1:
                    node = intersection(node, _multiples(int(multiple)), self.limits)
            return node
        if low is None and high is None:
            return number()
        least_bound, above = low or (None, False)
        most_bound, below = high or (None, False)
        return numbers(least_bound, above, most_bound, below, self.limits)

    def _string(self, alternative: _Alternative) -> Node:
        least, most = self._lengths(alternative)
        if not alternative.patterns and not alternative.formats:
            return free_string() if not least and most is None else plain_string(least, most)
        return sequence(QUOTE, self._content(alternative), QUOTE)

    def _lengths(self, alternative: _Alternative) -> tuple[int, int | None]:
        least, most = alternative.least_length or 0, alternative.most_length
        return least, most if most is None or most < least else min(most, max(least, self.nesting.characters))

    def _content(self, alternative: _Alternative) -> Node:
        least, most = self._lengths(alternative)
        contents = [self._pattern(*each)[0] for each in alternative.patterns]
        contents += [format_content(name) for name, _ in alternative.formats]
        if least or most is not None or not contents:
            contents.append(repeat(ANY_CHARACTER, least, most))
        return reduce(lambda a, b: intersection(a, b, self.limits), contents)

    def _pattern(self, pattern: Any, pointer: str) -> tuple[Node, ByteAutomaton]:
        """Contents of strings in which the pattern occurs."""
        if not isinstance(pattern, str):
            raise SchemaError(pointer, "it must be a string")
        if pattern not in self._patterns:
            try:
                found = search(parse_regex(pattern, string_character, ecma=True), ANY_CHARACTER)
            except RegexError as error:
                raise SchemaError(pointer, f"the regular expression is invalid {error}") from error
            automaton = determinize(found, self.limits)
            self._patterns[pattern] = automaton_node(automaton), automaton
        return self._patterns[pattern]

    def _matches(self, pattern: str, name: str, pointer: str) -> bool:
        return self._pattern(pattern, pointer)[1].matches(_text(name, pointer)[1:-1])

    def _array(self, alternative: _Alternative) -> Node:
        least, most = alternative.least_items or 0, alternative.most_items
        if most is not None and most >= least:
            most = min(most, max(least, self.nesting.items))
        prefix = [self._node(parts, alternative.level) for parts in alternative.prefix]
        if alternative.unique and (most is None or most > 1):
            return self._unique(alternative, prefix, least, most)
        if prefix and alternative.items is None and least <= len(prefix):
            most = _least(len(prefix), most)  # what no schema names is not written
        kept = next((i for i, node in enumerate(prefix) if node is NOTHING), len(prefix))
        if kept < len(prefix):
            most = kept if most is None else min(most, kept)
        prefix = prefix[:most]
        item = self._node(alternative.items or (), alternative.level)
        if item is NOTHING:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and least > most:
            return NOTHING
        rest = max(least - len(prefix), 0), None if most is None else most - len(prefix)
        parts, required = list(prefix), [position < least for position in range(len(prefix))]
        if not prefix:
            content = repeat(item, *rest, COMMA)
        else:
            content = EMPTY if rest[1] == 0 else repeat(sequence(COMMA, item), *rest)
            for position in range(len(parts) - 1, -1, -1):
                content = sequence(parts[position], content)
                content = content if position == 0 else sequence(COMMA, content)
                content = content if required[position] else union(content, EMPTY)
        return sequence(text("["), content, text("]"))

    def _unique(self, alternative: _Alternative, prefix: list[Node], least: int, most: int | None) -> Node:
        """Items that differ: some of a fixed list of values, in its order."""
        found = self._alternatives(alternative.items, alternative.level) if alternative.items else []
        if prefix or not found or any(each.values is None or each.excluded for each in found):
            raise SchemaError(alternative.unique[0], "it is supported for items of an enum, and for at most one item")
        values: list[Any] = []
        for each in found:
            automaton = determinize(self._values(each), self.limits)
            kept = [value for value in each.values or () if automaton.matches(_text(value, each.pointer))]
            values += [value for value in kept if not any(_same(value, other) for other in values)]
        if least > len(values):
            return NOTHING
        if least <= 1 and (most is None or most >= len(values)):
            content = entries(list(map(constant, values)), [False] * len(values), COMMA, not_empty=least == 1)
            return sequence(text("["), content, text("]"))
        most = len(values) if most is None else min(most, len(values))
        # suffix[n][position]: between n and n + (most - least) further items from `position` on
        memo: dict[tuple[int, int], Node] = {}
        for position in range(len(values), -1, -1):
            for taken in range(most + 1):
                options = [EMPTY] if taken >= least else []
                if taken < most:
                    for following in range(position, len(values)):
                        before = COMMA if taken else EMPTY
                        rest = memo[following + 1, taken + 1]
                        options.append(sequence(before, constant(values[following]), rest))
                memo[position, taken] = union(*options)
        return sequence(text("["), memo[0, 0], text("]"))

    def _object(self, alternative: _Alternative) -> Node:
        names, is_open = self._names(alternative)
        least, most = alternative.least_properties or 0, alternative.most_properties
        at = alternative.pointer
        free = is_open and not alternative.pattern_properties and alternative.additional is None
        if free and not least and most is None:
            return any_object(self.nesting.free + 1)
        parts, required = [], []
        for name, schemas in names.items():
            needed = name in alternative.required
            value = self._node(schemas, alternative.level)
            if value is NOTHING and needed:
                return NOTHING
            if value is not NOTHING:
                parts.append(sequence(text(_text(name, at).decode()), COLON, value))
                required.append(needed)
        if most is not None and len(parts) > most:
            if sum(required) > most:
                return NOTHING
            raise SchemaError(f"{at}/maxProperties", f"it must be at least the number of properties, {len(parts)}")
        if least > 1 and sum(required) < least:
            if len(parts) < least and not is_open:
                return NOTHING
            raise SchemaError(f"{at}/minProperties", "it must be at most 1 or the number of required properties")
        rest = None if most is None else most - len(parts)
        if is_open and rest != 0:
            others = self._others(alternative)
            if others is not NOTHING:
                parts.append(repeat(others, 1, rest, COMMA))
                required.append(False)
        if least == 1 and not parts:
            return NOTHING
        content = entries(parts, required, COMMA, not_empty=least == 1 and not any(required))
        return sequence(text("{"), content, text("}"))

    def _names(self, alternative: _Alternative) -> tuple[dict[str, Parts], bool]:
        """Properties that are written with their schemas, in order, and whether others are written, too."""
        names = [*(alternative.properties or {}), *alternative.required]
        found = {name: self._property(alternative, name) for name in names}
        schemas = [schema for schema, _ in alternative.additional or ()]
        if any(schema not in (True, {}, False) for schema in schemas):
            return found, True
        if False in [schema for schema in schemas if isinstance(schema, bool)]:
            return found, bool(alternative.pattern_properties) and not found
        return found, not found

    def _others(self, alternative: _Alternative) -> Node:
        """One further property, whose name is none of the given ones."""
        strings = repeat(ANY_CHARACTER)
        names = union(*(text(_text(name, "")[1:-1].decode()) for name in self._names(alternative)[0]))
        patterns = [(self._pattern(name, parts[0][1])[0], parts) for name, parts in alternative.pattern_properties]
        closed = any(schema is False for schema, _ in alternative.additional or ())
        options = []
        use_patterns = alternative.additional is None or closed
        for number_, (key, parts) in enumerate(patterns):
            if use_patterns:
                others = [other for i, (other, _) in enumerate(patterns) if i != number_]
                key = difference(key, union(names, *others), self.limits)
                options.append(sequence(QUOTE, key, QUOTE, COLON, self._node(parts, alternative.level)))
        if not closed and not (patterns and use_patterns):
            taken = union(names, *(key for key, _ in patterns))
            key = strings if taken is NOTHING else difference(strings, taken, self.limits)
            options.append(
                sequence(QUOTE, key, QUOTE, COLON, self._node(alternative.additional or (), alternative.level))
            )
        return union(*options)

    # Proofs

    def _disjoint(self, alternative: _Alternative) -> _Alternative:
        """The alternative, of which no text is valid by what it excludes. Optional properties that would make it valid
        are left out. Raises SchemaError if there is no proof."""
        for other, pointer in alternative.excluded:
            if alternative.values is not None:
                kept = tuple(each for each in alternative.values if self._rejects(other, each))
                alternative = replace(alternative, values=kept)
            elif not self._never(alternative, other):
                for name in other.required:
                    named = alternative.properties or {}
                    if name in alternative.required or alternative.written_types() != {"object"}:
                        continue
                    changed = replace(alternative, properties={**named, name: ((False, pointer),)})
                    if self._never(changed, other):
                        alternative = changed
                        break
                else:
                    raise SchemaError(
                        pointer,
                        "it is not supported where values may be valid by what it excludes; alternatives must differ "
                        "in their types, in the values of a required property, or in their required properties",
                    )
        return alternative

    def _never(self, a: _Alternative, b: _Alternative, depth: int = 0) -> bool:
        """No text of `a` is valid by `b`, provably."""
        if a.values is not None:
            return all(self._rejects(b, each) or self._rejects(a, each) for each in a.values)
        if b.values is not None and all(self._rejects(a, each) or self._rejects(b, each) for each in b.values):
            return True
        return all(self._never_of_type(a, b, kind, depth) for kind in a.written_types())

    def _never_of_type(self, a: _Alternative, b: _Alternative, kind: str, depth: int) -> bool:
        if b.types is not None and not _common(frozenset({kind}), b.types):
            return True
        if kind in ("integer", "number"):
            return _apart(a, b) or _apart(b, a)
        if kind == "string":
            if (a.least_length or 0) > _or_infinite(b.most_length) or (b.least_length or 0) > _or_infinite(
                a.most_length
            ):
                return True
            if not (a.patterns or a.formats) or not b.patterns:
                return False
            return intersection(self._content(a), self._content(replace(b, formats=())), self.limits) is NOTHING
        if kind == "array":
            if (a.least_items or 0) > _or_infinite(b.most_items) or (b.least_items or 0) > _or_infinite(a.most_items):
                return True
            shared = range(min(a.least_items or 0, max(len(a.prefix), len(b.prefix), 1)))
            return depth < 4 and any(self._apart_parts(_item(a, i), _item(b, i), a, b, depth) for i in shared)
        if kind == "object":
            names, is_open = self._names(a)
            written = {name for name, parts in names.items() if not any(schema is False for schema, _ in parts)}
            excluded = {name for name in names if name not in written}
            if any(name not in written and (not is_open or name in excluded) for name in b.required):
                return True
            return depth < 4 and any(
                self._apart_parts(names[name], self._property(b, name), a, b, depth) for name in a.required
            )
        return False

    def _apart_parts(self, a: Parts, b: Parts, of_a: _Alternative, of_b: _Alternative, depth: int) -> bool:
        """No value written by the schemas `a` is valid by the schemas `b`."""
        if not b:
            return False
        left = self._alternatives(a, of_a.level, checking=True) if a else [_Alternative(of_a.pointer)]
        right = self._alternatives(b, of_b.level, checking=True)
        return all(self._never(x, y, depth + 1) for x in left for y in right)

    def _rejects(self, alternative: _Alternative, value: Any) -> bool:
        """The value is not valid, provably."""
        if not _has_type(value, alternative.types):
            return True
        if alternative.values is not None and not any(_same(value, each) for each in alternative.values):
            return True
        if isinstance(value, str):
            encoded = _text(value, alternative.pointer)[1:-1]
            return not (alternative.least_length or 0) <= len(value) <= _or_infinite(alternative.most_length) or any(
                not self._pattern(*each)[1].matches(encoded) for each in alternative.patterns
            )
        if _kind(value) == "number":
            point = Decimal(str(value)), False
            return _apart(_Alternative("", low=point, high=point), alternative)
        if isinstance(value, list):
            if not (alternative.least_items or 0) <= len(value) <= _or_infinite(alternative.most_items):
                return True
            return any(self._all_reject(_item(alternative, i), each, alternative) for i, each in enumerate(value))
        if isinstance(value, dict):
            if not set(alternative.required) <= set(value):
                return True
            return any(self._all_reject(self._property(alternative, k), v, alternative) for k, v in value.items())
        return False

    def _all_reject(self, parts: Parts, value: Any, around: _Alternative) -> bool:
        if not parts:
            return False
        found = self._alternatives(parts, around.level, checking=True)
        return all(self._rejects(each, value) for each in found)


def parse_schema(value: str) -> Any:
    """The schema of a JSON text. Raises SchemaError."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise SchemaError("", f"not valid JSON: {error}") from error


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _at(schema: Any, pointer: str) -> Any:
    """What a JSON pointer leads to; None: nothing."""
    if pointer and not pointer.startswith("/"):
        return None
    for name in pointer.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and name.isdigit() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return None
    return schema


def _list(schema: dict[str, Any], keyword: str, pointer: str) -> list[Any]:
    value = schema.get(keyword, [])
    if not isinstance(value, list):
        raise SchemaError(f"{pointer}/{keyword}", "it must be an array")
    return value


def _object(schema: dict[str, Any], keyword: str, pointer: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise SchemaError(f"{pointer}/{keyword}", "it must be an object")
    return value


def _types(schema: dict[str, Any], pointer: str) -> frozenset[str] | None:
    value = schema.get("type")
    if value is None or value == "any":
        return None
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(each, str) and each in TYPES for each in names):
        raise SchemaError(f"{pointer}/type", f"{value!r} is not a type, or a list of types, of JSON schemas")
    return frozenset(names)


def _common(a: frozenset[str], b: frozenset[str]) -> frozenset[str]:
    """Types in both: an integer is a number."""
    found = set(a & b)
    if ("integer" in a and "number" in b) or ("integer" in b and "number" in a):
        found.add("integer")
    return frozenset(found)


def _decimal(schema: dict[str, Any], keyword: str, pointer: str) -> Decimal | None:
    value = schema.get(keyword)
    if value is None or isinstance(value, bool):
        return None
    try:
        number_ = Decimal(str(value))
    except InvalidOperation:
        number_ = Decimal("nan")
    if not isinstance(value, int | float) or not number_.is_finite() or abs(number_.adjusted()) > 400:
        raise SchemaError(f"{pointer}/{keyword}", "it must be a finite number")
    return number_


def _bound(schema: dict[str, Any], keyword: str, exclusive: str, pointer: str) -> tuple[Decimal, bool] | None:
    bound, strict = _decimal(schema, keyword, pointer), _decimal(schema, exclusive, pointer)
    found = [] if bound is None else [(bound, schema.get(exclusive) is True)]  # draft 4: a boolean
    if strict is not None:
        found.append((strict, True))
    if not found:
        return None
    return max(found) if keyword == "minimum" else min(found, key=lambda each: (each[0], not each[1]))


def _count(schema: dict[str, Any], keyword: str, pointer: str) -> int | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise SchemaError(f"{pointer}/{keyword}", "it must be a whole number that is not negative")
    return int(value)


def _whole(bound: Decimal, strict: bool, up: bool) -> int:
    """The least integer above a bound, or the greatest below."""
    value = int(bound.to_integral_value("ROUND_CEILING" if up else "ROUND_FLOOR"))
    if strict and value == bound:
        value += 1 if up else -1
    return value


def _multiples(divisor: int) -> Node:
    """Integers that are multiples: states are remainders."""
    import numpy as np

    classes = np.zeros(256, np.int64)
    classes[ord("-")] = 11
    classes[48:58] = np.arange(1, 11)
    transitions = np.full((divisor + 1, 12), -1, np.int32)  # state 0: the start; 1 + r: the remainder r
    remainders = np.concatenate(([0], np.arange(divisor)))
    transitions[:, 1:11] = (remainders[:, None] * 10 + np.arange(10)) % divisor + 1
    transitions[0, 11] = 0
    return automaton_node(ByteAutomaton(classes, transitions, np.arange(divisor + 1) == 1))


def _apart(a: _Alternative, b: _Alternative) -> bool:
    """The lower bound of `a` lies above the upper bound of `b`, or the ranges share no number."""
    for low, high in ((a.low, b.high), (b.low, a.high)):
        if low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
            return True
    return False


def _joined(a: Parts, b: Parts) -> Parts:
    """The schemas of both, each one once."""
    known = {id(schema) for schema, _ in a}
    return a + tuple(each for each in b if isinstance(each[0], bool) or id(each[0]) not in known)


def _item(alternative: _Alternative, position: int) -> Parts:
    return alternative.prefix[position] if position < len(alternative.prefix) else alternative.items or ()


def _most(a: int | None, b: int | None) -> int | None:
    return max((each for each in (a, b) if each is not None), default=None)


def _least(a: int | None, b: int | None) -> int | None:
    return min((each for each in (a, b) if each is not None), default=None)


def _or_infinite(value: int | None) -> float:
    return float("inf") if value is None else value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _has_type(value: Any, types: Iterable[str] | None) -> bool:
    if types is None:
        return True
    kind = _kind(value)
    return kind in types or (kind == "number" and "integer" in types and value == int(value))


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, and true equals no number."""
    if _kind(a) != _kind(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def _text(value: Any, pointer: str) -> bytes:
    try:
        return dumps(value).encode()
    except ValueError as error:  # infinite, or a lone surrogate
        raise SchemaError(pointer, f"it holds a value that JSON cannot write: {error}") from error
