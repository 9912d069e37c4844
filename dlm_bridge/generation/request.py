"""Requests of a sampling engine, and the events that it reports of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

MASK = -1  # in token ids: a position without a token, in a prompt one to fill


@dataclass(frozen=True)
class Request:
    """A sequence to sample.

    Positions in the request's events are counted from its first new token; with the engine's setting `infill`, from
    the first token of its prompt.

    Args:
        name: identifies the request; unique among those that wait or run.
        prompt: token ids; with `infill`, `MASK` at each position to fill.
        gen_length: number of new tokens; None: the engine's setting.
        seed: seed of the request's random numbers; None: drawn from torch's global random state.
        stream: report `Extended` and `Committed` events, in an engine that streams.
    """

    name: Hashable
    prompt: Sequence[int]
    gen_length: int | None = None
    seed: int | None = None
    stream: bool = True


@dataclass(frozen=True)
class Committed:
    """Tokens that one forward pass committed or changed, at any position of the request, also behind its end.

    Args:
        forwards: forward passes that the request has taken part in.
        positions: positions of the tokens.
        tokens: [len(positions)] token ids.
    """

    name: Any
    forwards: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Extended:
    """The next final tokens of a request, from position `first` on: no later step changes them, and everything on
    their left has been reported. The concatenation of a request's `Extended` events is its text."""

    name: Any
    first: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """A request is complete.

    Args:
        tokens: its tokens, up to and including the one that ends it.
        finish_reason: "stop": an end-of-sequence token, a stop string, or fewer than `gen_length` tokens of a sampler
            that chooses the length; "length": `gen_length` tokens.
        forwards: forward passes that the request took part in.
        canvas: of an engine that records, all positions of the request, also those behind its end; `MASK` where
            nothing was committed.
        steps: of an engine that records, for each position of `canvas` the number of the request's forward pass that
            committed or last changed it, from 1; 0: none.
    """

    name: Any
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    forwards: int
    canvas: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Failed:
    """A request that has no result, with the reason; of an engine always a DlmBridgeError, a RowError where the others
    are not affected."""

    name: Any
    error: Exception


Event = Committed | Extended | Ended | Failed


class Engine(Protocol):
    """What `generate`, files of prompts, evaluations, rollouts and the server sample with. Not thread-safe.

    engine.submit(Request("a", prompt_ids, seed=0))
    while not engine.idle:
        for event in engine.step():
            ...
        # submit() and cancel() at any time between two calls of step()
    """

    @property
    def forwards(self) -> int:
        """Forward passes of the model so far."""

    @property
    def idle(self) -> bool:
        """True if no request waits or runs, and no event is left to report."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises DlmBridgeError for one that cannot be sampled."""

    def cancel(self, name: Hashable) -> bool:
        """Drop a request, of which there are no more events. False if there is none of this name."""

    def step(self) -> list[Event]:
        """Run to the next step boundary. Returns what has happened since the last call."""

    def close(self) -> None:
        """Drop all requests, and let others use the model."""
