"""Regular languages over bytes: syntax trees, their deterministic automata, products of automata.

A syntax tree is built with `characters`, `text`, `sequence`, `union`, `repeat` and so on; `determinize` turns it into
a `ByteAutomaton`. A character is its UTF-8 encoding, so an automaton never accepts a part of a character.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

Ranges = tuple[tuple[int, int], ...]  # of code points or of bytes: sorted, disjoint, both ends included

START, END = 256, 257  # symbols beside the bytes: the anchors `^` and `$`
_ALL_CHARACTERS: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))  # without surrogates, which UTF-8 cannot encode
_LARGE = 3000  # states from which only the acyclic part is minimized
_NFA = 20  # states of the nondeterministic automaton for each permitted one of the deterministic automaton


class TooLargeError(ValueError):
    """An automaton exceeds the limit of states or of time."""


@dataclass
class Limits:
    """Budget of one compilation: states of an automaton, and the time at which it stops."""

    max_states: int
    deadline: float

    def check_states(self, states: int) -> None:
        """Raise TooLargeError for an automaton with more states than allowed."""
        if states > self.max_states:
            raise TooLargeError(
                f"it needs an automaton of more than {self.max_states:,} states: shorten strings and arrays "
                "(maxLength, maxItems), repetitions or nesting"
            )

    def check_time(self) -> None:
        """Raise TooLargeError at the deadline."""
        if time.monotonic() > self.deadline:
            raise TooLargeError("compiling it takes too long: simplify it")


@dataclass(eq=False)
class Node:
    """Syntax tree of a regular language. Nodes are compared by identity."""


@dataclass(eq=False)
class _Symbols(Node):
    mask: int  # bit b: byte b; bits 256 and 257: the anchors


@dataclass(eq=False)
class _Sequence(Node):
    parts: tuple[Node, ...]


@dataclass(eq=False)
class _Union(Node):
    parts: tuple[Node, ...]


@dataclass(eq=False)
class _Repeat(Node):
    part: Node
    least: int
    most: int | None
    separator: Node


@dataclass(eq=False)
class _Entries(Node):
    parts: tuple[Node, ...]
    required: tuple[bool, ...]
    separator: Node
    not_empty: bool


@dataclass(eq=False)
class _Automaton(Node):
    automaton: ByteAutomaton


EMPTY: Node = _Sequence(())  # the empty text alone
NOTHING: Node = _Union(())  # no text at all
START_ANCHOR: Node = _Symbols(1 << START)
END_ANCHOR: Node = _Symbols(1 << END)


def characters(ranges: Ranges) -> Node:
    """One character out of ranges of code points. Surrogates are left out."""
    return _characters(intersect_ranges(ranges, _ALL_CHARACTERS))


def text(value: str) -> Node:
    """One text."""
    return literal(value.encode())


def literal(value: bytes) -> Node:
    """One sequence of bytes."""
    return sequence(*(_byte(each) for each in value))


def sequence(*parts: Node) -> Node:
    """The parts one after the other."""
    flat: list[Node] = []
    for part in parts:
        if part is NOTHING:
            return NOTHING
        flat.extend(part.parts if isinstance(part, _Sequence) else (part,))
        if isinstance(part, _Repeat):
            _separated(flat)
    return flat[0] if len(flat) == 1 else _Sequence(tuple(flat)) if flat else EMPTY


def _separated(parts: list[Node]) -> None:
    """Write `x (s x)*` at the end as a repetition with a separator, which has one copy of `x` instead of two."""
    last = parts[-1]
    if not isinstance(last, _Repeat) or last.least or last.most is not None or last.separator is not EMPTY:
        return
    inner = last.part.parts if isinstance(last.part, _Sequence) else ()
    same = 0
    while same < min(len(inner) - 1, len(parts) - 1) and inner[-1 - same] is parts[-2 - same]:
        same += 1
    if same:
        separator, part = sequence(*inner[:-same]), sequence(*inner[-same:])
        parts[-1 - same :] = [_Repeat(part, 1, None, separator)]


def union(*parts: Node) -> Node:
    """One of the parts."""
    flat: dict[Node, None] = {}
    for part in parts:
        flat.update(dict.fromkeys(part.parts if isinstance(part, _Union) else (part,)))
    return next(iter(flat)) if len(flat) == 1 else _Union(tuple(flat)) if flat else NOTHING


def optional(part: Node) -> Node:
    """The part or the empty text."""
    return union(part, EMPTY)


def repeat(part: Node, least: int = 0, most: int | None = None, separator: Node = EMPTY) -> Node:
    """The part `least` to `most` times (None: any number), with the separator between two of them."""
    if most is not None and most < least:
        return NOTHING
    if most == 0:
        return EMPTY
    if part is NOTHING:
        return NOTHING if least else EMPTY
    return _Repeat(part, least, most, separator)


def entries(parts: Sequence[Node], required: Sequence[bool], separator: Node, not_empty: bool = False) -> Node:
    """The parts in their order, with the separator between two of them. Those that are not `required` may be left out;
    `not_empty`: not all of them."""
    return _Entries(tuple(parts), tuple(required), separator, not_empty)


def intersection(a: Node, b: Node, limits: Limits) -> Node:
    """What belongs to both languages."""
    return _product(a, b, limits, lambda in_a, in_b: in_a & in_b)


def difference(a: Node, b: Node, limits: Limits) -> Node:
    """What belongs to the first language only."""
    return _product(a, b, limits, lambda in_a, in_b: in_a & ~in_b)


def automaton_node(automaton: ByteAutomaton) -> Node:
    """The language of an automaton."""
    return NOTHING if automaton.empty else _Automaton(automaton)


def intersect_ranges(a: Ranges, b: Ranges) -> Ranges:
    """What lies in ranges of both."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low <= high:
            found.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges sorted, with overlapping and adjacent ones joined."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def negate_ranges(ranges: Ranges, last: int = 0x10FFFF) -> Ranges:
    """What lies in none of the ranges, from 0 to `last`."""
    found, start = [], 0
    for low, high in ranges:
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, last)) if start <= last else tuple(found)


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """Deterministic automaton over bytes. State 0 is the start state; a state that leads to no accepting one does not
    exist.

    Args:
        classes: [256] class of each byte; bytes of a class have equal transitions.
        transitions: [S, K] next state, -1 for none.
        accepting: [S] bool.
    """

    classes: np.ndarray
    transitions: np.ndarray
    accepting: np.ndarray

    @property
    def empty(self) -> bool:
        """No text is accepted."""
        return not len(self.accepting)

    def matches(self, value: bytes) -> bool:
        """The automaton accepts these bytes."""
        state = -1 if self.empty else 0
        for each in value:
            if state < 0:
                return False
            state = int(self.transitions[state, self.classes[each]])
        return state >= 0 and bool(self.accepting[state])


def determinize(root: Node, limits: Limits) -> ByteAutomaton:
    """Minimized deterministic automaton of a syntax tree.

    Anchors hold where they stand at the start or at the end of the text, and nowhere else.

    Raises TooLargeError.
    """
    nfa = _Nfa(limits)
    start = nfa.build(root, nfa.accept)
    classes, members = nfa.byte_classes()
    count = int(classes.max()) + 1
    first = nfa.closure((start,), 1 << START)
    ids = {first: 0}
    found, rows, accepting = [first], [], []
    unions: dict[tuple[int, ...], int] = {}
    for state, each in enumerate(found):  # `found` grows
        if not state % 256:
            limits.check_time()
            limits.check_states(len(found))
        accepting.append(nfa.accepts(each))
        targets: dict[int, tuple[int, ...]] = {}
        for source in each:
            for symbols, target in nfa.edges[source]:
                for byte_class in members[symbols]:
                    targets[byte_class] = (*targets[byte_class], target) if byte_class in targets else (target,)
        row = [-1] * count
        for byte_class, key in targets.items():
            number = unions.get(key)
            if number is None:
                closed = nfa.closure(key)
                number = ids.setdefault(closed, len(found))
                if number == len(found):
                    found.append(closed)
                unions[key] = number
            row[byte_class] = number
        rows.append(row)
    return _minimized(classes, np.array(rows, np.int32).reshape(len(rows), count), np.array(accepting, bool), limits)


@dataclass
class _Nfa:
    """Nondeterministic automaton. Fragments are built from their end to their start, so that equal endings are shared:
    `build(node, end)` is the state from which `node` leads to `end`."""

    limits: Limits
    edges: list[tuple[tuple[int, int], ...]] = field(default_factory=list)  # (symbols, target) of each state
    empty: list[tuple[int, ...]] = field(default_factory=list)  # targets without a symbol
    masks: dict[int, int] = field(default_factory=dict)  # number of each set of symbols
    built: dict[tuple[Node, int], int] = field(default_factory=dict)
    states: dict[tuple[int, int], int] = field(default_factory=dict)
    closed: dict[int, frozenset[int]] = field(default_factory=dict)
    accept: int = 0

    def __post_init__(self) -> None:
        self.accept = self._state()

    def _state(self, edges: tuple[tuple[int, int], ...] = (), empty: tuple[int, ...] = ()) -> int:
        self.edges.append(edges)
        self.empty.append(empty)
        if not len(self.edges) % 4096:
            self.limits.check_time()
            if len(self.edges) > _NFA * self.limits.max_states:
                self.limits.check_states(len(self.edges))
        return len(self.edges) - 1

    def build(self, node: Node, end: int) -> int:
        """State from which the node's texts lead to `end`."""
        if isinstance(node, _Symbols):
            return self._symbols(node.mask, end)
        if isinstance(node, _Sequence):
            for part in reversed(node.parts):
                end = self.build(part, end)
            return end
        key = (node, end)
        if key not in self.built:
            self.built[key] = self._build(node, end)
        return self.built[key]

    def _symbols(self, mask: int, end: int) -> int:
        number = self.masks.setdefault(mask, len(self.masks))
        key = (number, end)
        if key not in self.states:
            self.states[key] = self._state(((number, end),))
        return self.states[key]

    def _build(self, node: Node, end: int) -> int:
        if isinstance(node, _Union):
            return self._state(empty=tuple(dict.fromkeys(self.build(part, end) for part in node.parts)))
        if isinstance(node, _Repeat):
            return self._repeat(node, end)
        if isinstance(node, _Entries):
            return self._entries(node, end)
        assert isinstance(node, _Automaton)
        return self._embed(node.automaton, end)

    def _repeat(self, node: _Repeat, end: int) -> int:
        if node.most is None:
            after = self._state()  # after one part: the end, or the separator and another part
            first = self.build(node.part, after)
            self.empty[after] = (end, self.build(node.separator, first))
            count = max(node.least, 1)
        else:
            count = max(node.least, 1)
            after = self._copies(sequence(node.separator, node.part), node.most - count, end, optional=True)
            first = self.build(node.part, after)
        first = self._copies(sequence(node.part, node.separator), count - 1, first, optional=False)
        return first if node.least else self._state(empty=(first, end))

    def _copies(self, node: Node, count: int, end: int, optional: bool) -> int:
        """State from which `count` copies of the node lead to `end`; `optional`: so many at most. The first one is
        built, the others are its states, moved."""
        if not count:
            return end
        hole = self._state()  # the end of the first copy
        start = len(self.edges)
        entry = self.build(node, hole)
        stop, following = len(self.edges), end
        for _ in range(count):
            shift = len(self.edges) - start
            for state in range(start, stop):
                edges, empty = self.edges[state], self.empty[state]
                self.edges.append(tuple([(m, following if t == hole else t + shift) for m, t in edges]))
                self.empty.append(tuple([following if t == hole else t + shift for t in empty]))
            moved = following if entry == hole else entry + shift
            following = self._state(empty=(moved, end)) if optional else moved
            self.limits.check_time()
            if len(self.edges) > _NFA * self.limits.max_states:
                self.limits.check_states(len(self.edges))
        return following

    def _entries(self, node: _Entries, end: int) -> int:
        none = end if not node.not_empty else self._state()
        some = end
        for part, required in zip(reversed(node.parts), reversed(node.required), strict=True):
            first = self.build(part, some)
            following = self.build(node.separator, first)
            none = first if required else self._state(empty=(first, none))
            some = following if required else self._state(empty=(following, some))
        return none

    def _embed(self, automaton: ByteAutomaton, end: int) -> int:
        bits = [0] * automaton.transitions.shape[1]
        for byte, byte_class in enumerate(automaton.classes.tolist()):
            bits[byte_class] |= 1 << byte
        offset = len(self.edges)
        for row, accepts in zip(automaton.transitions.tolist(), automaton.accepting.tolist(), strict=True):
            masks: dict[int, int] = {}
            for byte_class, target in enumerate(row):
                if target >= 0:
                    masks[target] = masks.get(target, 0) | bits[byte_class]
            edges = tuple((self.masks.setdefault(m, len(self.masks)), offset + t) for t, m in masks.items())
            self._state(edges, (end,) if accepts else ())
        return offset

    def byte_classes(self) -> tuple[np.ndarray, list[tuple[int, ...]]]:
        """Class of each byte, and the classes of each set of symbols."""
        columns: dict[int, int] = {}
        classes = np.zeros(256, np.int64)
        masks = list(self.masks)
        for byte in range(256):
            column = sum(1 << number for number, mask in enumerate(masks) if mask >> byte & 1)
            classes[byte] = columns.setdefault(column, len(columns))
        members: list[list[int]] = [[] for _ in masks]
        for column, byte_class in columns.items():
            number = 0
            while column:
                if column & 1:
                    members[number].append(byte_class)
                column >>= 1
                number += 1
        return classes, [tuple(each) for each in members]

    def closure(self, states: tuple[int, ...], anchors: int = 0) -> frozenset[int]:
        """The states that have symbols, or accept, among these and those reached without a symbol."""
        if len(states) == 1 and not anchors and states[0] in self.closed:
            return self.closed[states[0]]
        masks = list(self.masks) if anchors else []
        seen, waiting, kept = set(states), list(states), set()
        while waiting:
            state = waiting.pop()
            if self.edges[state] or state == self.accept:
                kept.add(state)
            following = list(self.empty[state])
            if anchors:
                following += [target for symbols, target in self.edges[state] if masks[symbols] & anchors]
            for target in following:
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        result = frozenset(kept)
        if len(states) == 1 and not anchors:
            self.closed[states[0]] = result
        return result

    def accepts(self, states: frozenset[int]) -> bool:
        """The text may end in one of these states."""
        if self.accept in states:
            return True
        end = self.masks.get(1 << END)
        if end is None or not any(symbols == end for state in states for symbols, _ in self.edges[state]):
            return False
        return self.accept in self.closure(tuple(states), 1 << END)


def _minimized(classes: np.ndarray, transitions: np.ndarray, accepting: np.ndarray, limits: Limits) -> ByteAutomaton:
    alive = _leading_to(transitions, accepting)
    if not alive[0]:
        return ByteAutomaton(np.zeros(256, np.int64), np.zeros((0, 1), np.int32), np.zeros(0, bool))
    renumbered = np.cumsum(alive) - 1
    transitions = transitions[alive]
    dead = (transitions < 0) | ~alive[transitions]
    transitions = np.where(dead, -1, renumbered[transitions]).astype(np.int32)
    accepting = accepting[alive]
    if len(accepting) <= _LARGE:
        groups = _refined(transitions, accepting, limits)
    else:
        groups = _merged_bottom_up(transitions, accepting)
    _, representatives, groups = np.unique(groups, return_index=True, return_inverse=True)
    order = np.argsort(representatives)  # the start state stays first
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    groups, representatives = position[groups], representatives[order]
    rows = transitions[representatives]
    rows = np.where(rows < 0, -1, groups[rows]).astype(np.int32)
    columns, inverse = np.unique(rows.T, axis=0, return_inverse=True)
    return ByteAutomaton(inverse.reshape(-1)[classes], np.ascontiguousarray(columns.T), accepting[representatives])


def _leading_to(transitions: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """[S] bool: an accepting state can be reached."""
    return distances(transitions, accepting) >= 0


def distances(transitions: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """[S] the fewest transitions to an accepting state; -1: there is none."""
    count = len(accepting)
    pairs = [np.zeros(0, np.int64)]
    for column in transitions.T:
        sources = np.nonzero(column >= 0)[0]
        pairs.append(column[sources].astype(np.int64) * count + sources)
        if sum(map(len, pairs)) > 4_000_000:
            pairs = [np.unique(np.concatenate(pairs))]
    joined = np.unique(np.concatenate(pairs))
    targets, sources = joined // max(count, 1), joined % max(count, 1)
    first = np.searchsorted(targets, np.arange(count + 1))
    result = np.where(accepting, 0, -1).astype(np.int64)
    frontier, distance = np.nonzero(accepting)[0], 0
    while len(frontier):
        distance += 1
        found = sources[_ranges(first[frontier], first[frontier + 1])]
        found = np.unique(found[result[found] < 0])
        result[found] = distance
        frontier = found
    return result


def _ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The integers of all half-open ranges, one range after the other."""
    lengths = ends - starts
    total = int(lengths.sum())
    offsets = np.repeat(starts - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return np.arange(total) + offsets


def _refined(transitions: np.ndarray, accepting: np.ndarray, limits: Limits) -> np.ndarray:
    """Moore's algorithm: [S] group of equivalent states."""
    groups, count = accepting.astype(np.int64), 0
    weights = np.random.default_rng(0).integers(1, 2**63, (2, transitions.shape[1] + 1), np.uint64)
    while True:
        padded = np.append(groups + 1, 0).astype(np.uint64)  # the last one for transitions of -1
        following = padded[transitions]
        signatures = np.empty((len(groups), 2), np.uint64)
        for each in range(2):
            signatures[:, each] = following @ weights[each, 1:] + padded[:-1] * weights[each, 0]
        pairs = signatures.view([("a", np.uint64), ("b", np.uint64)]).reshape(-1)
        unique, groups = np.unique(pairs, return_inverse=True)
        if len(unique) == count:
            return groups
        count = len(unique)
        limits.check_time()


def _merged_bottom_up(transitions: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """[S] group of states with equal transitions, found from the accepting states upwards. States on cycles of more
    than one state keep a group of their own: a large automaton is minimized in part, in linear time."""
    rows = transitions.tolist()
    accepts = accepting.tolist()
    successors = [sorted({target for target in row if target >= 0}) for row in rows]
    order, alone = _components(successors)
    groups = [-1] * len(rows)
    signatures: dict[object, int] = {}
    for state in order:
        if alone[state]:
            row = tuple(-1 if t < 0 else -2 if t == state else groups[t] for t in rows[state])
            groups[state] = signatures.setdefault((accepts[state], row), len(signatures))
        else:
            groups[state] = signatures.setdefault(state, len(signatures))
    return np.array(groups, np.int64)


def _components(successors: list[list[int]]) -> tuple[list[int], list[bool]]:
    """Tarjan's algorithm: the states with successors first, and whether each is a component of its own."""
    count = len(successors)
    index, low, on_stack = [-1] * count, [0] * count, [False] * count
    alone, order, stack, number = [True] * count, [], [], 0
    for root in range(count):
        if index[root] >= 0:
            continue
        calls = [(root, 0)]
        while calls:
            state, edge = calls.pop()
            if edge == 0:
                index[state] = low[state] = number
                number += 1
                stack.append(state)
                on_stack[state] = True
            advanced = False
            for position in range(edge, len(successors[state])):
                target = successors[state][position]
                if index[target] < 0:
                    calls += [(state, position + 1), (target, 0)]
                    advanced = True
                    break
                if on_stack[target]:
                    low[state] = min(low[state], index[target])
            if advanced:
                continue
            if low[state] == index[state]:
                members: list[int] = []
                while not members or members[-1] != state:
                    members.append(stack.pop())
                    on_stack[members[-1]] = False
                for member in members:
                    alone[member] = len(members) == 1
                order += members
            if calls:
                low[calls[-1][0]] = min(low[calls[-1][0]], low[state])
    return order, alone


def _product(a: Node, b: Node, limits: Limits, accepts: Callable[[Any, Any], Any]) -> Node:
    left, right = determinize(a, limits), determinize(b, limits)
    if left.empty:
        return NOTHING
    if right.empty:
        return a if accepts(True, False) else NOTHING
    joined = left.classes * right.transitions.shape[1] + right.classes
    unique, classes = np.unique(joined, return_inverse=True)
    columns_left = np.vstack([left.transitions, np.full((1, left.transitions.shape[1]), -1, np.int32)])
    columns_right = np.vstack([right.transitions, np.full((1, right.transitions.shape[1]), -1, np.int32)])
    columns_left = columns_left[:, unique // right.transitions.shape[1]].tolist()
    columns_right = columns_right[:, unique % right.transitions.shape[1]].tolist()
    ids = {(0, 0): 0}
    found, rows = [(0, 0)], []
    for number, (i, j) in enumerate(found):
        if not number % 256:
            limits.check_time()
            limits.check_states(len(found))
        row = []
        for pair in zip(columns_left[i], columns_right[j], strict=True):
            if pair[0] < 0:
                row.append(-1)
                continue
            target = ids.setdefault(pair, len(found))
            if target == len(found):
                found.append(pair)
            row.append(target)
        rows.append(row)
    in_left = np.append(left.accepting, False)[[i for i, _ in found]]
    in_right = np.append(right.accepting, False)[[j for _, j in found]]
    accepting = accepts(in_left, in_right)
    return automaton_node(_minimized(classes.reshape(-1), np.array(rows, np.int32), accepting, limits))


@lru_cache(maxsize=512)
def _byte(value: int) -> Node:
    return _Symbols(1 << value)


@lru_cache(maxsize=4096)
def _characters(ranges: Ranges) -> Node:
    """Sequences of byte ranges, shared where several have the same ending."""
    sequences: dict[tuple[tuple[int, int], ...], int] = {}  # by the bytes after the first
    for low, high in ranges:
        for each in _utf8(low, high):
            mask = (1 << each[0][1] + 1) - (1 << each[0][0])
            sequences[each[1:]] = sequences.get(each[1:], 0) | mask
    return union(*(sequence(_Symbols(mask), *map(_byte_range, rest)) for rest, mask in sequences.items()))


@lru_cache(maxsize=4096)
def _byte_range(limits: tuple[int, int]) -> Node:
    return _Symbols((1 << limits[1] + 1) - (1 << limits[0]))


def _utf8(low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """Ranges of the encoding's bytes for a range of code points: every combination of bytes out of one sequence of
    ranges is a character of the range."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            return _utf8(low, last) + _utf8(last + 1, high)
    length = len(chr(high).encode())
    for bits in range(6, 6 * length, 6):
        span = (1 << bits) - 1
        if low >> bits != high >> bits:
            if low & span:
                return _utf8(low, low | span) + _utf8((low | span) + 1, high)
            if high & span != span:
                return _utf8(low, (high & ~span) - 1) + _utf8(high & ~span, high)
    return [tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))]
