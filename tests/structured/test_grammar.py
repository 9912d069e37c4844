"""Grammars in Lark's notation and in EBNF."""

from __future__ import annotations

import time

import pytest

from dlm_bridge.errors import SettingError
from dlm_bridge.structured.compile import byte_automaton
from dlm_bridge.structured.constraint import Constraint
from dlm_bridge.structured.languages import Limits
from tests.refusals import refused

SUM = """
?start: sum                 // a comment
sum: product (("+" | "-") product)*
product: atom ("*" atom)* -> times
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
"""
EBNF = """
root ::= "[" ws [0-9a-f]+ ("," ws [^"\\]]{1,2})* "]" .?   # a comment
ws   ::= [ \\t]*
"""


@pytest.mark.parametrize(
    ("grammar", "accepted", "rejected"),
    [
        ('start: "a" start | "b"', ["b", "aaab", "a" * 200 + "b"], ["", "a", "ba"]),
        ('start: start "a" | "b"', ["b", "b" + "a" * 200], ["ab"]),
        ('start: "(" start ")" |', ["", "(())", "(" * 20 + ")" * 20], ["(", "())", "(" * 60 + ")" * 60]),
        (SUM, ["1", "1+2*3-4", "(1+2)*(3*(4))"], ["1+", "(1", "1 + 2"]),
        (EBNF, ["[1f]", "[ a, xy,z]", "[1]\n"[:-1] + "é"], ["[]", "[g]", '[1,"]', "[1,xyz]"]),
        ('x: ["a"] "b"~2..3 "Ä"i? \'"\'', ['bb"', 'abbbä"', 'bbÄ"'], ["bb", 'b"', 'bbbb"']),
        ('a: b "," a | b\nb: /\\d/ | "<" a ">"', ["1,2,3,4,5,6,7,8,9,0", "1,<2,<3>>"], ["1,", "<1"]),
        ('start: start? "x"', ["x", "xx"], [""]),
        ('start: /^a|b$/ "c"', ["ac", "bc"], ["c"]),
    ],
)
def test_texts_of_a_grammar(grammar: str, accepted: list[str], rejected: list[str]) -> None:
    found = byte_automaton(Constraint.grammar(grammar), Limits(50_000, time.monotonic() + 60))
    for text in accepted:
        assert found.matches(text.encode()), text
    for text in rejected:
        assert not found.matches(text.encode()), text


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("", "no rules"),
        ('"a"', "line 1"),
        ('start: "a"\n  other\n', "'other'"),
        ('start: ("a"', "line 1"),
        ('a: "b"\na: "c"', "line 2"),
        ('start: "a"\n%ignore /x/', "%ignore"),
        ("start: /(?=a)/", "line 1"),
        ('start: "a" )', "line 1"),
        ("start: start", ""),
        ('start: "a" & "b"', "line 1"),
        ('start: *"a"', "line 1"),
        ('start: "\\q"', "line 1"),
        ('start: "a"~3..2', "line 1"),
    ],
)
def test_an_invalid_grammar_is_refused(grammar: str, named: str) -> None:
    with refused(SettingError, "constraint", named):
        byte_automaton(Constraint.grammar(grammar), Limits(50_000, time.monotonic() + 60))
