"""Regular expressions: the regular part of Python's syntax, and of ECMAScript's for `pattern` of a JSON schema."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from dlm_bridge.structured.languages import (
    EMPTY,
    END_ANCHOR,
    START_ANCHOR,
    Node,
    Ranges,
    characters,
    merge_ranges,
    negate_ranges,
    repeat,
    sequence,
    union,
)

ANY: Ranges = ((0, 0x10FFFF),)
_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES: Ranges = ((9, 13), (32, 32))
_ECMA_SPACES: Ranges = (*_SPACES, (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
                        (0x205F, 0x205F), (0x3000, 0x3000))  # fmt: skip
_ECMA_LINES: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_QUANTIFIER = re.compile(r"\{(\d*)(?:(,)(\d*))?\}")
_HEXADECIMAL = {"x": 2, "u": 4, "U": 8}
_MAX_COUNT = 100_000
_MAX_DEPTH = 100


class RegexError(ValueError):
    """A regular expression is invalid, or not regular.

    Args:
        position: of the first character at fault, counted from 0.
        reason: the problem.
    """

    def __init__(self, position: int, reason: str) -> None:
        self.position, self.reason = position, reason
        super().__init__(f"at character {position} (counted from 0): {reason}")


def parse_regex(pattern: str, encode: Callable[[Ranges], Node] = characters, ecma: bool = False) -> Node:
    """Syntax tree of a regular expression.

    `\\d`, `\\w` and `\\s` are those of `re.ASCII`. Groups do not capture, and a lazy quantifier is its greedy one: the
    language is the same. Refused: lookaround, backreferences, possessive quantifiers, atomic groups, word
    boundaries and inline flags.

    Args:
        encode: syntax tree of one character out of ranges of code points.
        ecma: `.` and `\\s` as in ECMAScript.

    Raises RegexError.
    """
    parser = _Parser(pattern, encode, ecma)
    node = parser.union(0)
    if parser.position < len(pattern):
        raise RegexError(parser.position, "unbalanced parenthesis")
    return node


@dataclass
class _Parser:
    pattern: str
    encode: Callable[[Ranges], Node]
    ecma: bool
    position: int = 0

    def union(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise RegexError(self.position, f"groups are nested deeper than {_MAX_DEPTH}")
        parts = [self._sequence(depth)]
        while self._take("|"):
            parts.append(self._sequence(depth))
        return union(*parts)

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.position < len(self.pattern) and self.pattern[self.position] not in "|)":
            parts.append(self._quantified(depth))
        return sequence(*parts)

    def _quantified(self, depth: int) -> Node:
        start = self.position
        node, repeatable = self._atom(depth)
        bounds = self._quantifier()
        if bounds is None:
            return node
        if not repeatable:
            raise RegexError(start, "nothing to repeat")
        least, most = bounds
        if most is not None and least > most:
            raise RegexError(start, "the least number of repetitions is greater than the most")
        if max(least, most or 0) > _MAX_COUNT:
            raise RegexError(start, f"more than {_MAX_COUNT:,} repetitions")
        self._take("?")
        if self._peek() == "+":
            raise RegexError(self.position, "possessive quantifiers are not regular")
        again = self.position
        if self._quantifier() is not None:
            raise RegexError(again, "multiple repeat")
        return repeat(node, least, most)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for symbol, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(symbol):
                return bounds
        match = _QUANTIFIER.match(self.pattern, self.position)
        if match is None:
            return None
        least, comma, most = match.groups()
        if not least and (self.ecma or not comma):  # these characters themselves
            return None
        self.position = match.end()
        return int(least or 0), int(most) if most else None if comma else int(least)

    def _atom(self, depth: int) -> tuple[Node, bool]:
        start = self.position
        symbol = self.pattern[start]
        self.position += 1
        if symbol == "(":
            return self._group(start, depth), True
        if symbol == "[":
            return self.encode(self._class(start)), True
        if symbol == ".":
            return self.encode(negate_ranges(_ECMA_LINES if self.ecma else ((10, 10),))), True
        if symbol == "^":
            return START_ANCHOR, False
        if symbol == "$":
            return END_ANCHOR, False
        if symbol in "*+?":
            raise RegexError(start, "nothing to repeat")
        if symbol == "\\":
            if self._peek() == "A":
                self.position += 1
                return START_ANCHOR, False
            if self._peek() in ("Z", "z"):
                self.position += 1
                return END_ANCHOR, False
            return self.encode(self._escape(start, in_class=False)), True
        self.position = start
        if self._quantifier() is not None:
            raise RegexError(start, "nothing to repeat")
        self.position = start + 1
        return self.encode(((ord(symbol), ord(symbol)),)), True

    def _group(self, start: int, depth: int) -> Node:
        if self._take("?") and not self._take(":"):
            name = re.compile(r"P?<[A-Za-z_]\w*>").match(self.pattern, self.position)
            if name is None:
                raise RegexError(start, f"{self.pattern[start : start + 4]!r} is not supported: only groups are")
            self.position = name.end()
        node = self.union(depth + 1)
        if not self._take(")"):
            raise RegexError(start, "missing ), unterminated group")
        return node

    def _class(self, start: int) -> Ranges:
        negated = self._take("^")
        found: list[tuple[int, int]] = []
        first = True
        while True:
            if self.position >= len(self.pattern):
                raise RegexError(start, "unterminated character class")
            if self._peek() == "]" and not (first and not self.ecma):
                self.position += 1
                break
            first = False
            at = self.position
            low = self._class_item()
            if self._peek() == "-" and self.pattern[self.position + 1 : self.position + 2] not in ("]", ""):
                if not _single(low):
                    if not self.ecma:
                        raise RegexError(at, "bad character range")
                    found += low  # ECMAScript without the flag u: the hyphen is a character
                    continue
                self.position += 1
                high = self._class_item()
                if not _single(high):
                    if not self.ecma:
                        raise RegexError(at, "bad character range")
                    found += [*low, (45, 45), *high]
                    continue
                if low[0][0] > high[0][0]:
                    raise RegexError(at, "bad character range")
                found.append((low[0][0], high[0][0]))
            else:
                found += low
        ranges = merge_ranges(found)
        return negate_ranges(ranges) if negated else ranges

    def _class_item(self) -> Ranges:
        start = self.position
        symbol = self.pattern[start]
        self.position += 1
        if symbol == "\\":
            return self._escape(start, in_class=True)
        return ((ord(symbol), ord(symbol)),)

    def _escape(self, start: int, in_class: bool) -> Ranges:
        symbol = self._peek()
        if not symbol:
            raise RegexError(start, "bad escape at the end")
        self.position += 1
        kinds = {"d": _DIGITS, "w": _WORD, "s": _ECMA_SPACES if self.ecma else _SPACES}
        if symbol.lower() in kinds:
            ranges = kinds[symbol.lower()]
            return negate_ranges(ranges) if symbol.isupper() else ranges
        if symbol in _CONTROL:
            return _one(_CONTROL[symbol])
        if symbol == "a" and not self.ecma:
            return _one(7)
        if symbol == "b" and in_class:
            return _one(8)
        if symbol == "0" and not self._peek().isdigit():
            return _one(0)
        if symbol in _HEXADECIMAL:
            return _one(self._hexadecimal(start, symbol))
        if symbol == "c" and self.ecma and re.match("[A-Za-z]", self._peek()):
            self.position += 1
            return _one(ord(self.pattern[self.position - 1]) % 32)
        if symbol in "pP":
            return self._property(start, symbol == "P")
        if symbol.isascii() and symbol.isalnum():
            reason = "is a backreference, which is not regular" if symbol.isdigit() else "is not supported"
            raise RegexError(start, f"\\{symbol} {reason}")
        return _one(ord(symbol))

    def _hexadecimal(self, start: int, symbol: str) -> int:
        pattern = rf"\{{([0-9A-Fa-f]{{1,6}})\}}|([0-9A-Fa-f]{{{_HEXADECIMAL[symbol]}}})"
        match = re.compile(pattern).match(self.pattern, self.position)
        if match is None or (match[1] and symbol != "u"):
            raise RegexError(start, f"incomplete escape \\{symbol}")
        self.position = match.end()
        value = int(match[1] or match[2], 16)
        if 0xD800 <= value < 0xDC00:  # ECMAScript writes a character beyond the first 65,536 as two surrogates
            low = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self.pattern, self.position)
            if low is not None:
                self.position = low.end()
                return 0x10000 + (value - 0xD800 << 10) + int(low[1], 16) - 0xDC00
        if value > sys.maxunicode:
            raise RegexError(start, "no such character")
        return value

    def _property(self, start: int, negated: bool) -> Ranges:
        match = re.compile(r"\{(?:General_Category=|gc=)?(\w+)\}").match(self.pattern, self.position)
        ranges = _category(_CATEGORIES.get(match[1], match[1])) if match else ()
        if match is None or not ranges:
            raise RegexError(start, "only general categories are supported, such as \\p{L} and \\p{Lu}")
        self.position = match.end()
        return negate_ranges(ranges) if negated else ranges

    def _peek(self) -> str:
        return self.pattern[self.position : self.position + 1]

    def _take(self, symbol: str) -> bool:
        taken = self._peek() == symbol
        self.position += taken
        return taken


_CATEGORIES = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S", "Separator": "Z", "Mark": "M"}


@lru_cache(maxsize=64)
def _category(name: str) -> Ranges:
    """Characters of a general category, or of a group of them."""
    if not re.fullmatch("[LMNPSZC][a-z]?", name):
        return ()
    found: list[tuple[int, int]] = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code)).startswith(name):
            if found and found[-1][1] == code - 1:
                found[-1] = (found[-1][0], code)
            else:
                found.append((code, code))
    return tuple(found)


def _one(code: int) -> Ranges:
    return ((code, code),)


def _single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def search(pattern: Node, anything: Node) -> Node:
    """Texts in which the pattern occurs. `anything`: one character, whichever."""
    around = repeat(anything)
    return sequence(around, pattern, around) if pattern is not EMPTY else around
