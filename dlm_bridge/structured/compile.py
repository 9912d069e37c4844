"""Compilation of a constraint to the token automaton of one tokenizer."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from dlm_bridge.errors import SettingError, counted
from dlm_bridge.structured.automaton import TokenAutomaton
from dlm_bridge.structured.cache import cache_key, cached, store
from dlm_bridge.structured.constraint import Constraint
from dlm_bridge.structured.grammar import GrammarError, parse_grammar
from dlm_bridge.structured.json_schema import NESTINGS, SchemaCompiler, SchemaError, parse_schema
from dlm_bridge.structured.json_text import any_object
from dlm_bridge.structured.languages import (
    ByteAutomaton,
    Limits,
    Node,
    TooLargeError,
    determinize,
    distances,
    text,
    union,
)
from dlm_bridge.structured.regex import RegexError, parse_regex
from dlm_bridge.structured.tokens import TokenBytes, token_bytes

MAX_STATES = 50_000
SECONDS = 60.0
OBJECT_DEPTH = 5  # levels of arrays and objects of `Constraint.json_object`
GRAMMAR_DEPTHS = (24, 12, 6, 3)  # recursive rules that lie in each other
_NESTED_STATES = 6000  # limit before a smaller depth is tried
_MAX_ENTRIES = 100_000_000  # of the table of transitions: 800 MB
_CHUNK = 1 << 21  # pairs of a state and a prefix of a token that are expanded together


def compile_constraint(
    constraint: Constraint,
    tokenizer: Any,
    *,
    vocabulary_size: int,
    mask_token_id: int | None,
    eos_token_ids: Collection[int],
    pad_token_id: int | None,
    max_states: int = MAX_STATES,
    seconds: float = SECONDS,
) -> TokenAutomaton:
    """Automaton of the sequences of tokens whose text belongs to the constraint's language.

    Every tokenization of a text is accepted. Special tokens, the mask token and tokens without a text are allowed in
    no state; the end-of-sequence and padding tokens follow a complete text. Automata are cached in memory and on disk.

    Args:
        tokenizer: a tokenizer of transformers.
        vocabulary_size: the model's number of logits. Ids without a token are never allowed.
        eos_token_ids: the end-of-sequence tokens.
        max_states: limit of the automaton's states.
        seconds: limit of the time.

    Raises:
        SettingError: `constraint` is invalid or not supported, exceeds a limit, or has no text that the tokenizer can
            write.
    """
    ends = {*eos_token_ids} | ({pad_token_id} if pad_token_id is not None else set())
    excluded = ends | ({mask_token_id} if mask_token_id is not None else set())
    tokens = token_bytes(tokenizer, vocabulary_size, excluded)
    kept = tuple(sorted(each for each in ends if each < vocabulary_size))
    key = cache_key(constraint.kind, constraint.text, tokens.fingerprint, vocabulary_size, kept, max_states)
    if (known := cached(key)) is not None:
        return known
    limits = Limits(max_states, time.monotonic() + seconds)
    try:
        automaton = byte_automaton(constraint, limits)
        if constraint.kind == "choice":
            _check_choices(constraint.text, tokens)
        compiled = _token_automaton(automaton, tokens, kept, limits)
    except TooLargeError as error:
        raise SettingError("constraint", str(error)) from error
    store(key, compiled)
    return compiled


def byte_automaton(constraint: Constraint, limits: Limits) -> ByteAutomaton:
    """Automaton of a constraint's texts.

    A schema or grammar that nests without a limit is written to the largest depth of a list whose automaton is small.

    Raises:
        SettingError: `constraint` is invalid or not supported, or has no text.
        TooLargeError: a limit is exceeded.
    """
    nestings = (
        NESTINGS if constraint.kind == "json_schema" else GRAMMAR_DEPTHS if constraint.kind == "grammar" else (0,)
    )
    for number, nesting in enumerate(nestings):
        last = number == len(nestings) - 1
        within = limits if last else Limits(min(limits.max_states, _NESTED_STATES), limits.deadline)
        try:
            automaton = determinize(_language(constraint, within, nesting), within)
            break
        except TooLargeError:
            limits.check_time()
            if last:
                raise
        except RecursionError as error:
            raise SettingError("constraint", "it is nested too deeply") from error
    if automaton.empty:
        raise SettingError("constraint", "no text satisfies it")
    return automaton


def _language(constraint: Constraint, limits: Limits, nesting: Any) -> Node:
    """Syntax tree of a constraint's language."""
    if constraint.kind == "json_schema":
        try:
            return SchemaCompiler(parse_schema(constraint.text), limits, nesting).compile()
        except SchemaError as error:
            raise SettingError("constraint", f"the JSON schema is not supported at {error}") from error
    if constraint.kind == "grammar":
        try:
            return parse_grammar(constraint.text, limits, nesting)
        except GrammarError as error:
            raise SettingError("constraint", f"the grammar is not supported: {error}") from error
    if constraint.kind == "json_object":
        return any_object(OBJECT_DEPTH)
    if constraint.kind == "regex":
        try:
            return parse_regex(constraint.text)
        except RegexError as error:
            raise SettingError("constraint", f"the regular expression is invalid {error}") from error
    if constraint.kind == "choice":
        return union(*map(text, _choices(constraint.text)))
    raise SettingError("constraint", f"unknown kind {constraint.kind!r}")


def _choices(value: str) -> list[str]:
    try:
        choices = json.loads(value)
    except ValueError as error:
        raise SettingError("constraint", f"the choices are not valid JSON: {error}") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise SettingError("constraint", "the choices must be a list of texts that are not empty")
    for choice in choices:
        try:
            choice.encode()
        except UnicodeEncodeError:
            raise SettingError("constraint", f"the choice {choice!r} has a surrogate, which is no character") from None
    return choices


def _check_choices(value: str, tokens: TokenBytes) -> None:
    """Raise SettingError for a choice that is no sequence of tokens."""
    names = {each for each in tokens.tokens if each}
    longest = max(map(len, names), default=0)
    for choice in _choices(value):
        encoded = choice.encode()
        starts = [encoded, b" " + encoded] if tokens.strips_space else [encoded]
        if not any(_writable(start, names, longest) for start in starts):
            raise SettingError("constraint", f"the tokenizer has no tokens that write the choice {choice!r}")


def _writable(value: bytes, names: set[bytes], longest: int) -> bool:
    """The text is a sequence of tokens."""
    reached = [True] + [False] * len(value)
    for start in range(len(value)):
        if reached[start]:
            for end in range(start + 1, min(start + longest, len(value)) + 1):
                reached[end] = reached[end] or value[start:end] in names
    return reached[-1]


def _token_automaton(
    automaton: ByteAutomaton, tokens: TokenBytes, ends: tuple[int, ...], limits: Limits
) -> TokenAutomaton:
    if tokens.strips_space:
        automaton = _stripping_space(automaton)
    transitions, accepting = automaton.transitions, automaton.accepting
    trie = _Trie(tokens.tokens, automaton.classes, transitions)
    reached, hashes = _explore(trie, transitions, limits)
    kinds, first = _kinds_of(hashes)  # kind of each node with tokens, and a node of each kind
    classes = np.zeros(len(tokens.tokens), np.int64)
    classes[trie.token_ids] = kinds[trie.token_nodes] + 1
    states = np.nonzero(reached)[0]
    if len(states) * (len(first) + 2) > _MAX_ENTRIES:
        raise TooLargeError(
            f"its automaton of {counted(len(states), 'state')} and {counted(len(first), 'class', 'classes')} of "
            "tokens is too large: shorten strings and arrays (maxLength, maxItems), repetitions or nesting",
        )
    order = np.concatenate(([0], states[states != 0]))
    number = np.full(len(accepting) + 1, -1, np.int64)  # the last one for transitions of -1
    number[order] = np.arange(len(order))
    padded = np.vstack([transitions, np.full((1, transitions.shape[1]), -1, transitions.dtype)])
    table = np.full((len(order), len(first)), -1, np.int64)
    for kind, node in enumerate(first.tolist()):
        current: np.ndarray = order
        for byte_class in trie.path(node):
            current = padded[current, byte_class]
        table[:, kind] = number[current]
    return _pruned(classes, table, accepting[order], ends)


def _stripping_space(automaton: ByteAutomaton) -> ByteAutomaton:
    """A start state in front of the start state: one space is optional, since decoding removes it."""
    space = automaton.transitions[:, automaton.classes[32]]
    transitions = np.column_stack([automaton.transitions, space])  # the space has a class of its own
    classes = automaton.classes.copy()
    classes[32] = transitions.shape[1] - 1
    following = np.where(transitions < 0, -1, transitions + 1)
    rows = np.vstack([following[:1], following])
    rows[0, -1] = 1
    return ByteAutomaton(classes, rows, np.concatenate([automaton.accepting[:1], automaton.accepting]))


class _Trie:
    """Prefix tree of the tokens, with the classes of their bytes: tokens that the automaton cannot tell apart share
    their nodes. Nodes are numbered by depth, children of a node one after the other. Node 0 is the root."""

    def __init__(self, tokens: list[bytes], classes: np.ndarray, transitions: np.ndarray) -> None:
        lengths = np.array([len(each) for each in tokens], np.int64)
        data = classes[np.frombuffer(b"".join(tokens), np.uint8)]
        starts = np.cumsum(lengths) - lengths
        used = np.asarray((transitions >= 0).any(axis=0))
        dead: np.ndarray = np.append(0, np.cumsum(~used[data]))
        whole: np.ndarray = np.equal(dead[starts + lengths], dead[starts])
        alive = np.nonzero((lengths > 0) & whole)[0]
        count, width = 1, transitions.shape[1]
        parents, symbols, offset = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], 0
        ids, nodes = [], []
        current, waiting, depth = np.zeros(len(alive), np.int64), alive, 0
        while len(waiting):
            keys, inverse = np.unique(current * width + data[starts[waiting] + depth], return_inverse=True)
            offset = count
            parents.append(keys // width)
            symbols.append(keys % width)
            count += len(keys)
            current = inverse.reshape(-1) + offset
            depth += 1
            finished = lengths[waiting] == depth
            ids.append(waiting[finished])
            nodes.append(current[finished])
            current, waiting = current[~finished], waiting[~finished]
        self.parents, self.symbols = np.concatenate(parents), np.concatenate(symbols)
        self.first_child = np.searchsorted(self.parents[1:], np.arange(count + 1)) + 1
        self.token_ids = np.concatenate([np.zeros(0, np.int64), *ids])
        self.token_nodes = np.concatenate([np.zeros(0, np.int64), *nodes])
        self.terminal = np.zeros(count, bool)
        self.terminal[self.token_nodes] = True

    def path(self, node: int) -> list[int]:
        """Classes of the bytes from the root to a node."""
        found = []
        while node:
            found.append(int(self.symbols[node]))
            node = int(self.parents[node])
        return found[::-1]


def _explore(trie: _Trie, transitions: np.ndarray, limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    """States between tokens that are reached from the start state, [S] bool; and a hash of each node's column of
    transitions, [nodes, 2]: equal for nodes whose tokens have equal transitions in all reached states."""
    count = len(transitions)
    random = np.random.default_rng(0)
    weights = random.integers(1, 2**63, (2, count), np.uint64)
    values = random.integers(1, 2**63, (2, count), np.uint64)
    hashes = np.zeros((2, len(trie.parents)), np.uint64)
    reached = np.zeros(count, bool)
    reached[0] = True
    frontier = np.zeros(1, np.int64)
    rows = max(1, _CHUNK // len(trie.parents))
    total = 1
    while len(frontier):
        found = np.zeros(count, bool)
        for start in range(0, len(frontier), rows):
            limits.check_time()
            for origins, nodes, targets in _walk(trie, transitions, frontier[start : start + rows]):
                found[targets] = True
                for each in range(2):
                    np.add.at(hashes[each], nodes, weights[each, origins] * values[each, targets])
        frontier = np.nonzero(found & ~reached)[0]
        reached |= found
        total += len(frontier)
        limits.check_states(total)
    return reached, hashes.T


def _walk(trie: _Trie, transitions: np.ndarray, states: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """All tokens from each of the states, as (state, node, state after it) of the nodes at which tokens end."""
    results = []
    origins, nodes, current = states, np.zeros(len(states), np.int64), states
    while len(nodes):
        first, last = trie.first_child[nodes], trie.first_child[nodes + 1]
        counts = last - first
        total = int(counts.sum())
        offsets = np.repeat(first - (np.cumsum(counts) - counts), counts)
        children = np.arange(total) + offsets
        following = transitions[np.repeat(current, counts), trie.symbols[children]]
        alive = following >= 0
        origins, nodes = np.repeat(origins, counts)[alive], children[alive]
        current = following[alive]
        ending = trie.terminal[nodes]
        results.append((origins[ending], nodes[ending], current[ending]))
    return results


def _kinds_of(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Kind of each node by its hash, and a node of each kind. Nodes with the hash 0 are of kind -1: they are the same
    in every state, not allowed."""
    pairs = np.ascontiguousarray(hashes).view([("a", np.uint64), ("b", np.uint64)]).reshape(-1)
    unique, first, kinds = np.unique(pairs, return_index=True, return_inverse=True)
    kinds = kinds.reshape(-1)
    none = np.nonzero((unique["a"] == 0) & (unique["b"] == 0))[0]
    if len(none):  # the first of the sorted hashes
        kinds, first = kinds - 1, first[1:]
    return kinds, first


def _pruned(classes: np.ndarray, table: np.ndarray, accepting: np.ndarray, ends: tuple[int, ...]) -> TokenAutomaton:
    """Automaton without the states from which no text can be completed, with the state after the end."""
    steps = distances(table, accepting)
    if steps[0] < 0:
        raise SettingError("constraint", "the tokenizer has no tokens that write a text of it")
    kept = steps >= 0
    number = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1)
    table = number[table[kept]]
    columns, first, inverse = _unique_columns(table)
    end = int(kept.sum())
    # Class 0: allowed in no state; then the classes of tokens; the last one: end-of-sequence and padding.
    transitions = np.full((end + 1, columns + 2), -1, np.int64)
    transitions[:end, 1:-1] = table[:, first]
    transitions[:end, -1] = np.where(accepting[kept], end, -1)
    transitions[end, -1] = end
    mapping = np.concatenate(([0], inverse))
    classes = mapping[classes]
    classes[list(ends)] = columns + 1
    return TokenAutomaton(
        torch.from_numpy(classes),
        torch.from_numpy(transitions),
        torch.from_numpy(np.append(accepting[kept], True)),
        torch.from_numpy(np.append(steps[kept], 0)),
        end,
        ends,
    )


def _unique_columns(table: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Number of different columns, one of each, and the class of each column: 0 for columns of -1, else from 1."""
    live = np.nonzero((table >= 0).any(axis=0))[0]
    inverse = np.zeros(table.shape[1], np.int64)
    if not len(live):
        return 0, live, inverse
    weights = np.random.default_rng(1).integers(1, 2**63, (2, len(table)), np.uint64)
    pairs = np.stack([weights[each] @ (table[:, live] + 1).astype(np.uint64) for each in range(2)], axis=1)
    keys = np.ascontiguousarray(pairs).view([("a", np.uint64), ("b", np.uint64)]).reshape(-1)
    unique, first, numbers = np.unique(keys, return_index=True, return_inverse=True)
    inverse[live] = numbers.reshape(-1) + 1
    return len(unique), live[first], inverse
