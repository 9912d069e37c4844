"""Token automata: the compiled form of a constraint for one tokenizer."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenAutomaton:
    """A deterministic automaton over tokens. State 0 is the start state.

    Tokens with equal transitions in all states form a class. Class 0 holds the tokens that are allowed in no state,
    among them the mask token and tokens without a text. The state `end` absorbs end-of-sequence and padding tokens:
    these lead from accepting states, and from `end`, to `end`.

    Args:
        classes: [V] int64, class of each token.
        transitions: [S, C] int64, next state; -1: the token is not allowed.
        accepting: [S] bool, True at states in which the text may end. True at `end`.
        distances: [S] int64, the fewest tokens from the state to an accepting one. States from which none can be
            reached do not exist.
        end: the state after the end of the text.
        ends: ids of the end-of-sequence and padding tokens, which lead to `end`.
    """

    classes: torch.Tensor
    transitions: torch.Tensor
    accepting: torch.Tensor
    distances: torch.Tensor
    end: int
    ends: tuple[int, ...]

    @functools.cached_property
    def edges(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[E] state, next state and class of the transitions, ordered by state; and [S], their number from each
        state."""
        states, classes = (self.transitions >= 0).nonzero(as_tuple=True)
        counts = torch.bincount(states, minlength=len(self.distances))
        return states, self.transitions[states, classes], classes, counts

    @property
    def shortest(self) -> int:
        """The fewest tokens of a text, without an end-of-sequence token."""
        return int(self.distances[0])

    def advance(self, state: int, tokens: list[int]) -> int:
        """State after these tokens; -1 if they are not allowed."""
        for token in tokens:
            if state < 0:
                break
            state = int(self.transitions[state, self.classes[token]])
        return state
