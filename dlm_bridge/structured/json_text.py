"""JSON texts as regular languages: strings, numbers, values up to a depth, and formats of strings.

Separators are ", " and ": ", without other whitespace.
"""

from __future__ import annotations

import json
from decimal import Decimal
from functools import lru_cache
from typing import Any

from dlm_bridge.structured.languages import (
    EMPTY,
    NOTHING,
    Limits,
    Node,
    Ranges,
    characters,
    intersect_ranges,
    intersection,
    literal,
    optional,
    repeat,
    sequence,
    text,
    union,
)
from dlm_bridge.structured.regex import ANY, parse_regex

_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))  # characters that stand for themselves in a string
_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_FRACTION = 10  # most digits after the point of a number with bounds: doubles keep the order of so many

COMMA, COLON, QUOTE = text(", "), text(": "), text('"')


def dumps(value: Any) -> str:
    """JSON text of a value, as a constraint writes it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


@lru_cache(maxsize=4096)
def string_character(ranges: Ranges) -> Node:
    """One character of a JSON string. Characters that need an escape have their short one; control characters without
    a short escape are left out. So every string has one text."""
    escaped = [symbol for code, symbol in _ESCAPES.items() if any(low <= code <= high for low, high in ranges)]
    parts = [characters(intersect_ranges(ranges, _PLAIN))]
    if escaped:
        codes = sorted(ord(symbol) for symbol in escaped)
        parts.append(sequence(text("\\"), characters(tuple((code, code) for code in codes))))
    return union(*parts)


ANY_CHARACTER = string_character(ANY)


def plain_string(least: int = 0, most: int | None = None) -> Node:
    """JSON string of `least` to `most` characters, each with one text."""
    return sequence(QUOTE, repeat(ANY_CHARACTER, least, most), QUOTE)


@lru_cache(maxsize=1)
def free_string() -> Node:
    """Any JSON string, with escapes of the form \\uXXXX, too."""
    unicode = parse_regex(
        r"\\u([0-9a-fA-CE-Fa-ce-f][0-9A-Fa-f]{3}|[dD][0-7][0-9A-Fa-f]{2}"
        r"|[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2})"
    )
    return sequence(QUOTE, repeat(union(ANY_CHARACTER, text("\\/"), unicode)), QUOTE)


@lru_cache(maxsize=1)
def number() -> Node:
    """Any JSON number; exponents have at most two digits, so that a double can hold it."""
    return parse_regex(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d{1,2})?")


@lru_cache(maxsize=32)
def any_value(depth: int) -> Node:
    """Any JSON value with at most `depth` levels of arrays and objects."""
    scalars = [free_string(), number(), text("true"), text("false"), text("null")]
    if depth == 0:
        return union(*scalars)
    return union(*scalars, array(any_value(depth - 1)), any_object(depth))


@lru_cache(maxsize=32)
def any_object(depth: int) -> Node:
    """Any JSON object with at most `depth` levels of arrays and objects, itself included."""
    inner = any_value(depth - 1)
    return sequence(text("{"), repeat(sequence(free_string(), COLON, inner), separator=COMMA), text("}"))


def array(item: Node, least: int = 0, most: int | None = None) -> Node:
    """JSON array of `least` to `most` equal items."""
    return sequence(text("["), repeat(item, least, most, COMMA), text("]"))


_DIGIT = characters(((48, 57),))


def _digits(low: str, high: str) -> Node:
    return characters(((ord(low), ord(high)),)) if low <= high else NOTHING


def integers(low: int | None, high: int | None) -> Node:
    """Integers between two bounds, both included, without leading zeros and without "-0"."""
    parts = []
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append(sequence(text("-"), _naturals(least, None if low is None else -low)))
    return union(*parts)


def _naturals(low: int, high: int | None) -> Node:
    if high is not None and low > high:
        return NOTHING
    first = str(low)
    if high is None:
        longer = sequence(_digits("1", "9"), repeat(_DIGIT, len(first), None))
        return union(_between(first, "9" * len(first)), longer)
    parts = []
    for length in range(len(first), len(str(high)) + 1):
        least = max(low, 10 ** (length - 1) if length > 1 else 0)
        parts.append(_between(str(least), str(min(high, 10**length - 1))))
    return union(*parts)


def _between(low: str, high: str) -> Node:
    """Strings of digits of one length between two."""
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return repeat(_DIGIT, len(low), len(low))
    rest = len(low) - 1
    if low[0] == high[0]:
        return sequence(text(low[0]), _between(low[1:], high[1:]))
    middle = _digits(chr(ord(low[0]) + 1), chr(ord(high[0]) - 1))
    return union(
        sequence(text(low[0]), _between(low[1:], "9" * rest)),
        sequence(middle, repeat(_DIGIT, rest, rest)),
        sequence(text(high[0]), _between("0" * rest, high[1:])),
    )


def numbers(low: Decimal | None, above: bool, high: Decimal | None, below: bool, limits: Limits) -> Node:
    """Numbers between two bounds, without an exponent.

    Args:
        above: the lower bound is excluded.
        below: the upper bound is excluded.
    """
    zero = Decimal(0)
    parts = []
    if high is None or high > 0 or (high == 0 and not below):
        negative = low is None or low < 0
        parts.append(_magnitudes(zero if negative else low or zero, above and not negative, high, below, limits))
    if low is None or low < 0:
        least, strict = (zero, False) if high is None or high > 0 else (-high, below)
        parts.append(sequence(text("-"), _magnitudes(least, strict, None if low is None else -low, above, limits)))
    return union(*parts)


def _magnitudes(low: Decimal, above: bool, high: Decimal | None, below: bool, limits: Limits) -> Node:
    whole, fraction = _split(low)
    parts = [sequence(text(str(whole)), _fraction_from(fraction, above))]
    if high is None:
        return union(*parts, sequence(_naturals(whole + 1, None), _any_fraction()))
    last, most = _split(high)
    if last < whole:
        return NOTHING
    upper = _fraction_to(most, below)
    if last == whole:
        return sequence(text(str(whole)), intersection(_fraction_from(fraction, above), upper, limits))
    between = _naturals(whole + 1, last - 1)
    return union(*parts, sequence(between, _any_fraction()), sequence(text(str(last)), upper))


def _split(value: Decimal) -> tuple[int, str]:
    whole, _, fraction = format(value, "f").partition(".")
    return int(whole), fraction.rstrip("0")


def _any_fraction() -> Node:
    return optional(sequence(text("."), repeat(_DIGIT, 1, _FRACTION)))


def _fraction_from(least: str, strict: bool) -> Node:
    """Fractions of at least `least`, which has no zeros at its end."""
    if not least:
        return sequence(text("."), _not_zero()) if strict else _any_fraction()
    return sequence(text("."), _digits_from(least, strict))


def _not_zero() -> Node:
    return sequence(repeat(text("0"), 0, _FRACTION), _digits("1", "9"), repeat(_DIGIT, 0, _FRACTION))


def _digits_from(least: str, strict: bool) -> Node:
    greater = sequence(_digits(chr(ord(least[0]) + 1), "9"), repeat(_DIGIT, 0, _FRACTION))
    if len(least) > 1:
        equal = _digits_from(least[1:], strict)
    else:
        equal = _not_zero() if strict else repeat(_DIGIT, 0, _FRACTION)
    return union(greater, sequence(text(least[0]), equal))


def _fraction_to(most: str, strict: bool) -> Node:
    """Fractions of at most `most`, which has no zeros at its end."""
    if not most:
        return NOTHING if strict else optional(sequence(text("."), repeat(text("0"), 1, _FRACTION)))
    return optional(sequence(text("."), _digits_to(most, strict)))


def _digits_to(most: str, strict: bool) -> Node:
    less = sequence(_digits("0", chr(ord(most[0]) - 1)), repeat(_DIGIT, 0, _FRACTION))
    if len(most) > 1:
        equal = optional(_digits_to(most[1:], strict))
    else:
        equal = NOTHING if strict else repeat(text("0"), 0, _FRACTION)
    return union(less, sequence(text(most[0]), equal))


_YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20}){0,2}"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_WORD = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [rf"({_WORD}:){{7}}{_WORD}", rf"({_WORD}:){{1,7}}:"]
    + [rf"({_WORD}:){{1,{7 - n}}}(:{_WORD}){{1,{n}}}" for n in range(1, 7)]
    + [rf":(:{_WORD}){{1,7}}", "::"]
)
_URI_CHARACTER = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*://{_HOST}(:[1-9]\d{{0,3}})?(/{_URI_CHARACTER}*)*"
    rf"(\?({_URI_CHARACTER}|[/?])*)?(#({_URI_CHARACTER}|[/?])*)?"
)
_LOCAL = r"[A-Za-z0-9_%+-]{1,20}(\.[A-Za-z0-9_%+-]{1,20}){0,2}"
_DURATION = r"P(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)(T{0})?|T{0})".format(
    r"(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
)
_POINTER = r"(/([^~/]|~[01])*)*"

# Formats of strings, as patterns whose every text is valid by the format. They need not hold all its texts.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": rf"{_LOCAL}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": _HOST,
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(0|[1-9]\d*)(#|{_POINTER})",
    "regex": r"[A-Za-z0-9_ -]*",
}
for _wider, _narrower in {
    "idn-email": "email", "idn-hostname": "hostname", "uri-reference": "uri", "iri": "uri", "iri-reference": "uri",
    "uri-template": "uri", "ip-address": "ipv4", "host-name": "hostname",
}.items():  # fmt: skip
    FORMATS[_wider] = FORMATS[_narrower]


@lru_cache(maxsize=64)
def format_content(name: str) -> Node:
    """Content of a string of a format."""
    return parse_regex(FORMATS[name], string_character, ecma=True)


def constant(value: Any) -> Node:
    """The text of one value."""
    return literal(dumps(value).encode())
