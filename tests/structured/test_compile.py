"""Regular expressions and choices: byte automata against `re`, token automata against enumeration."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dlm_bridge.errors import SettingError
from dlm_bridge.structured import cache, compile
from dlm_bridge.structured.automaton import TokenAutomaton
from dlm_bridge.structured.compile import byte_automaton
from dlm_bridge.structured.constraint import Constraint
from dlm_bridge.structured.languages import ByteAutomaton, Limits
from tests.refusals import refused
from tests.structured.tokenizers import ALPHABET, EOS, MASK, PAD, byte_level, compiled, sentencepiece, word_level

PATTERNS = [
    "",
    "a",
    "a+b?",
    "(ab|ba)*",
    "a{2}",
    "a{1,3}b{,2}",
    "(a|ab)(b|)",
    "[^a]",
    "[a-b1]+",
    r"\d+",
    r"\w\s\W",
    ".",
    ".*b",
    "^a$",
    "(^a|b)+",
    "a|^b$|",
    "(?:a|b)*?1",
    "(?P<x>a)b",
    r"[\d\s]+",
    r"[^\d]",
    "é?",
    "[à-ü]b*",
    r"\x61\u0062",
    "[]a]",
    "a{x}",
    "a{,}b",
    r"\.|\\|\n",
    "(a*)*",
    "(a|b|)*1",
    "((a{0,2}){2}b)?",
    r"\Aa\Z",
    "(1b)+(,(1b)+)*",
    "a(b1a)*",
    "x*",
]


def automaton(constraint: Constraint, max_states: int = 50_000) -> ByteAutomaton:
    return byte_automaton(constraint, Limits(max_states, time.monotonic() + 60))


def texts(alphabet: str, length: int) -> list[str]:
    return ["".join(each) for n in range(length + 1) for each in itertools.product(alphabet, repeat=n)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_matches_what_re_matches(pattern: str) -> None:
    found = automaton(Constraint.regex(pattern))
    expected = re.compile(pattern, re.ASCII)
    for text in texts("ab1 é", 4) + texts("a{},x.\\\n", 3):
        assert found.matches(text.encode()) == bool(expected.fullmatch(text)), text


_ATOMS = st.sampled_from(["a", "b", "é", ".", "[ab]", "[^b]", r"\w", "(?:)"])
_REGEX = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: f"(?:{a}|{b})", inner, inner),
        st.builds(
            lambda a, q: f"(?:{a}){q}", inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "*?"])
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(_REGEX)
def test_any_regular_expression_matches_what_re_matches(pattern: str) -> None:
    try:
        found = automaton(Constraint.regex(pattern))
    except SettingError:  # the language is empty
        found = None
    expected = re.compile(pattern, re.ASCII)
    for text in texts("abé", 4):
        assert (found is not None and found.matches(text.encode())) == bool(expected.fullmatch(text)), text


@pytest.mark.parametrize(
    ("pattern", "position"),
    [
        ("a(b", 1),
        ("a)", 1),
        ("ab[c", 2),
        ("*a", 0),
        ("a**", 2),
        ("a(?=b)", 1),
        (r"(a)\1", 3),
        (r"a\b", 1),
        ("a++", 2),
        ("[b-a]", 1),
        ("a{3,2}", 0),
        (r"\x1", 0),
        ("ab\\", 2),
        (r"\q", 0),
    ],
)
def test_an_invalid_regular_expression_is_refused_with_the_position(pattern: str, position: int) -> None:
    with refused(SettingError, "constraint", f"character {position} "):
        automaton(Constraint.regex(pattern))


def test_no_text_and_too_many_states_and_too_little_time_are_refused() -> None:
    tokenizer = byte_level(*ALPHABET)
    with refused(SettingError, "constraint"):
        compiled(Constraint.regex("a$b"), tokenizer)
    with refused(SettingError, "constraint", "100"):
        compiled(Constraint.regex("[ab]{200}"), tokenizer, max_states=100)
    with refused(SettingError, "constraint", "50"):  # few when minimized, many before
        compiled(Constraint.regex("(a|b)*a(a|b){8}"), tokenizer, max_states=50)
    with refused(SettingError, "constraint", "too long"):
        compiled(Constraint.regex("a"), tokenizer, seconds=-1)


SPLIT = "😀".encode()  # over byte tokens
TINY = byte_level("a", "b", "ab", "ba", "Ġa", "1", "ð", "Ł", "ĺ", "Ģ")


@pytest.mark.parametrize("pattern", ["a+b?", "(ab|ba)*", "😀*1", ".{1,3}", "[^a]1?", r"\d|\sa", "a( a)*", "[^ab]+"])
def test_a_sequence_of_tokens_is_accepted_where_its_text_matches(pattern: str) -> None:
    found = compiled(Constraint.regex(pattern), TINY)
    values = [b"", b"", b"", b"a", b"b", b"ab", b"ba", b" a", b"1", *(SPLIT[i : i + 1] for i in range(4))]
    assert len(values) == len(TINY)
    check_all(found, pattern, values, 4)


def check_all(found: TokenAutomaton, pattern: str, values: list[bytes], length: int, strips: bool = False) -> None:
    """Compare with enumeration: acceptance, prefixes, distances, and the ends."""
    expected = re.compile(pattern, re.ASCII)
    ids = [i for i, value in enumerate(values) if value]
    accepted = set()
    for n in range(length + 1):
        for each in itertools.product(ids, repeat=n):
            raw = b"".join(values[i] for i in each)
            raw = raw[1:] if strips and raw.startswith(b" ") else raw
            try:
                matches = bool(expected.fullmatch(raw.decode()))
            except UnicodeDecodeError:
                matches = False
            state = found.advance(0, list(each))
            assert (state >= 0 and bool(found.accepting[state])) == matches, raw
            if matches:
                accepted.add(each)
                assert found.advance(0, [*each, EOS, PAD, EOS]) == found.end
                assert found.advance(0, [*each, MASK]) == -1
            elif state >= 0:
                assert found.advance(0, [*each, EOS]) == -1
    assert accepted
    assert found.shortest == min(map(len, accepted))
    for each in accepted:  # every prefix is a state, and no farther from acceptance than what is left
        for n in range(len(each) + 1):
            state = found.advance(0, list(each[:n]))
            assert 0 <= int(found.distances[state]) <= len(each) - n


def test_the_table_holds_what_its_description_says() -> None:
    found = compiled(Constraint.regex("(a|b1)*"), byte_level("a", "b", "1", "x", "<tool>"))
    states, classes = found.transitions.shape
    assert found.end == states - 1
    assert found.ends == (PAD, EOS)
    assert found.classes.shape == (len(SPECIAL_AND) + 2,)
    assert (found.transitions[:, 0] == -1).all()
    assert found.classes[[MASK, 6, 7, 8, 9]].tolist() == [0] * 5  # x, <tool> and ids without a token
    assert len({tuple(column) for column in found.transitions.T.tolist()}) == classes
    live = found.transitions[:-1]
    for state in range(states):  # distances: 0 at accepting states, else one more than the nearest
        nearest = [int(found.distances[t]) for t in found.transitions[state].tolist() if t >= 0]
        expected = 0 if found.accepting[state] else 1 + min(nearest)
        assert int(found.distances[state]) == expected
    assert ((live[:, -1] == found.end) == found.accepting[:-1]).all()


SPECIAL_AND = ["<pad>", "<eos>", "<mask>", "a", "b", "1", "x", "<tool>"]


def test_sentencepiece_loses_one_space_at_the_start_and_writes_bytes() -> None:
    tokenizer = sentencepiece("▁a", "a", "▁", "b", "<0xC3>", "<0xA9>")
    values = [b"", b"", b"", b" a", b"a", b" ", b"b", b"\xc3", b"\xa9"]
    for pattern in ["a b?", " a", "é+a?", "a*", "( ?a)+"]:
        check_all(compiled(Constraint.regex(pattern), tokenizer), pattern, values, 4, strips=True)
    for ids in ([3, 6], [5, 4], [7, 8, 3]):  # as the tokenizer decodes it
        assert tokenizer.decode(ids).encode() == b"".join(values[i] for i in ids).removeprefix(b" ")


def test_words_are_joined_with_spaces() -> None:
    tokenizer = word_level("yes", "no", "we", "can")
    found = compiled(Constraint.choice(["yes we can", "no"]), tokenizer)
    assert tokenizer.decode([3, 5, 6]) == "yes we can"
    assert [found.accepting[found.advance(0, ids)].item() for ids in ([3, 5, 6], [4])] == [True, True]
    assert found.advance(0, [3, 4]) == -1
    with refused(SettingError, "constraint", "'we could'"):
        compiled(Constraint.choice(["no", "we could"]), tokenizer)


def test_choices_that_are_prefixes_of_each_other_and_those_that_are_none() -> None:
    tokenizer = byte_level("a", "b", "ab")
    found = compiled(Constraint.choice(["a", "ab", "abab"]), tokenizer)
    accepted = [
        ids
        for n in range(5)
        for ids in itertools.product((3, 4, 5), repeat=n)
        if (state := found.advance(0, list(ids))) >= 0 and found.accepting[state]
    ]
    assert sorted(accepted) == sorted([(3,), (3, 4), (5,), (3, 4, 3, 4), (3, 4, 5), (5, 3, 4), (5, 5)])
    for choices in ([], [""], ["a", 1]):
        with refused(SettingError, "constraint"):
            compiled(Constraint.choice(choices), tokenizer)  # type: ignore[arg-type]
    with refused(SettingError, "constraint"):
        compiled(Constraint("choice", '["\\ud800"]'), tokenizer)
    with refused(SettingError, "constraint", "'c'"):
        compiled(Constraint.choice(["a", "c"]), tokenizer)


def test_a_regular_expression_that_the_tokenizer_cannot_write_is_refused() -> None:
    with refused(SettingError, "constraint", "tokenizer"):
        compiled(Constraint.regex("z"), byte_level("a"))


def test_automata_are_read_from_the_cache_and_damaged_files_are_not(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, constraint = byte_level("a", "b"), Constraint.regex("a*b")
    first = compiled(constraint, tokenizer)
    assert compiled(constraint, tokenizer) is first
    assert compiled(Constraint.regex("b*a"), tokenizer) is not first
    assert compiled(constraint, byte_level("b", "a")).classes.tolist() != first.classes.tolist()
    folder = own_cache / "dlm_bridge" / "structured"
    assert len(list(folder.iterdir())) == 3

    cache.forget()
    with monkeypatch.context() as patch:
        patch.setattr(compile, "byte_automaton", None)  # read, not compiled
        second = compiled(constraint, tokenizer)
    for name in ("classes", "transitions", "accepting", "distances"):
        assert torch.equal(getattr(first, name), getattr(second, name))
        assert getattr(first, name).dtype == getattr(second, name).dtype
    assert (first.end, first.ends) == (second.end, second.ends)

    files = {path: path.read_bytes() for path in folder.iterdir()}
    for path in files:
        tensors = load_file(path)
        tensors["transitions"][0, 0] = 1  # another table under the old digest
        facts = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])["__metadata__"]
        save_file(tensors, path, facts)
    cache.forget()
    assert torch.equal(compiled(constraint, tokenizer).transitions, first.transitions)
    for path, data in files.items():
        path.write_bytes(data[: len(data) // 2])
    cache.forget()
    assert torch.equal(compiled(constraint, tokenizer).transitions, first.transitions)


def test_the_cache_forgets_the_oldest_and_needs_no_disk(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, folder = byte_level("a", "b"), own_cache / "dlm_bridge" / "structured"
    compiled(Constraint.regex("a"), tokenizer)
    size = next(folder.iterdir()).stat().st_size
    monkeypatch.setattr(cache, "DISK_BYTES", 3 * size)
    for count in range(2, 8):
        compiled(Constraint.regex(f"a{{{count}}}"), tokenizer)
    assert 1 <= len(list(folder.iterdir())) <= 3
    blocked = own_cache / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert compiled(Constraint.regex("ab"), tokenizer).shortest == 2
