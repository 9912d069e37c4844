"""Small token automata, and enumeration of their texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from dlm_bridge.structured.automaton import TokenAutomaton
from dlm_bridge.structured.decoding import AutomatonConstraint


def automaton(
    table: Mapping[int, Mapping[int, int]], accepting: Sequence[int], vocabulary: int, ends: Sequence[int]
) -> TokenAutomaton:
    """Automaton with the transitions {state: {token: next state}}, whose start state is 0."""
    states = 1 + max([*table, *(to for row in table.values() for to in row.values())])
    end = states
    columns = torch.full((states + 1, vocabulary), -1)
    for state, row in table.items():
        for token, to in row.items():
            columns[state, token] = to
    accepts = torch.zeros(states + 1, dtype=torch.bool)
    accepts[[*accepting, end]] = True
    for token in ends:
        columns[accepts, token] = end
    columns = torch.cat([torch.full((states + 1, 1), -1), columns], dim=1)
    different, classes = columns.unique(dim=1, return_inverse=True)
    order = [int(classes[0]), *(column for column in range(different.shape[1]) if column != int(classes[0]))]
    place = torch.tensor(order).argsort()
    transitions = different[:, order]
    distances = torch.where(accepts, 0, 10**6)
    for _ in range(states + 1):
        following = torch.where(transitions >= 0, distances[transitions.clamp(min=0)] + 1, 10**6)
        distances = torch.minimum(distances, following.amin(dim=1))
    return TokenAutomaton(place[classes[1:]], transitions, accepts, distances, end, tuple(ends))


def constraint(
    table: Mapping[int, Mapping[int, int]], accepting: Sequence[int], vocabulary: int, ends: Sequence[int]
) -> AutomatonConstraint:
    return AutomatonConstraint(automaton(table, accepting, vocabulary, ends))


def canvases(one: TokenAutomaton, length: int) -> Iterator[tuple[int, ...]]:
    """All sequences of `length` tokens, with end tokens after the text, that the automaton accepts."""

    def extend(state: int, tokens: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(tokens) == length:
            if one.accepting[state]:
                yield tokens
            return
        for token in range(len(one.classes)):
            following = one.advance(state, [token])
            if following >= 0:
                yield from extend(following, (*tokens, token))

    return extend(0, ())


def accepts(one: TokenAutomaton, tokens: Sequence[int]) -> bool:
    state = one.advance(0, [int(token) for token in tokens])
    return state >= 0 and bool(one.accepting[state])
