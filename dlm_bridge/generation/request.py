"""Requests to a sampling engine, and the events that it reports."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from transformers import LogitsProcessor

MASK = -1  # token id of a masked position; in a prompt, of a position to fill in


class TextConstraint(Protocol):
    """Interface of a constraint on the whole text of a request. Objects of one class share a batch."""

    def check(self, request: Request, length: int, plan: Any = None) -> None:
        """Raise RowError or SettingError for a constraint that a text of at most `length` tokens cannot satisfy, or
        that does not fit the `SamplingPlan` (None: an autoregressive model)."""

    def decoder(self, canvas: Any, noise: Any, constraints: Mapping[Hashable, Any], *, edits: bool) -> Any:
        """`constraints.TextDecoder` of a run of the engine. `constraints` has those of the running rows, by name."""

    def processor(self, constraints: Sequence[Any], prompt_width: int, length: int) -> LogitsProcessor:
        """Logits processor of a closed batch of an autoregressive model; a row's constraint may be None."""

    def closes(self, tokens: Sequence[int]) -> bool:
        """True if nothing but an end-of-sequence token may follow this text."""

    def draft(
        self,
        constraints: Sequence[Any],
        texts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        logits_AQV: torch.Tensor,
        tokens_AQ: torch.Tensor,
    ) -> torch.Tensor:
        """[A, Q] tokens of DiffusionGemma's drafts after the rows' texts of at most `lengths` tokens: `tokens_AQ` if
        they can be completed, else the most probable ones. A row's constraint may be None."""


@dataclass(frozen=True)
class Request:
    """A sequence to sample.

    Positions in the request's events are counted from its first new token or, with the engine's setting `infill`, from
    the first token of its prompt.

    Args:
        name: identifier; unique among the waiting and running requests.
        prompt: token ids; with `infill`, `MASK` at each position to fill in.
        gen_length: number of new tokens; None: the engine's setting.
        seed: seed of the request's random numbers; None: drawn from torch's global random state.
        stream: report `Extended` and `Committed` events, if the engine has `stream=True`.
        constraint: language that the request's text must belong to; see `dlm_bridge.structured`.
    """

    name: Hashable
    prompt: Sequence[int]
    gen_length: int | None = None
    seed: int | None = None
    stream: bool = True
    constraint: TextConstraint | None = None


@dataclass(frozen=True)
class Committed:
    """Event: tokens that one forward pass committed or changed, at any position of the request, including positions
    after its end.

    Args:
        forwards: number of forward passes that the request has taken part in.
        positions: positions of the tokens.
        tokens: [len(positions)] token ids.
    """

    name: Any
    forwards: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Extended:
    """Event: the next final tokens of a request, starting at position `first`.

    No later step changes them, and all tokens to their left have been reported. The concatenation of a request's
    `Extended` events is its text.
    """

    name: Any
    first: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """Event: a request is finished.

    Args:
        tokens: token ids, up to and including the token that ends the text.
        finish_reason: "stop" for an end-of-sequence token, a stop string, or fewer than `gen_length` tokens from a
            sampler that chooses the length; "length" for `gen_length` tokens.
        forwards: number of forward passes that the request took part in.
        canvas: all positions of the request, including those after its end; `MASK` at positions without a committed
            token. Only from an engine with `record=True`.
        steps: for each position of `canvas`, the request's forward pass that committed or last changed it, counted
            from 1; 0 at positions without a committed token. Only from an engine with `record=True`.
        constraint_log_mass: of a request with a constraint, the sum over its committed masks of the logarithm of the
            probability that the model gave to the feasible tokens, at the commit. From samplers that commit masks.
    """

    name: Any
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    forwards: int
    canvas: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    constraint_log_mass: float | None = None


@dataclass(frozen=True)
class Failed:
    """Event: a request failed. From an engine, `error` is a DlmBridgeError: a RowError if only this request is
    affected."""

    name: Any
    error: Exception


Event = Committed | Extended | Ended | Failed


class Engine(Protocol):
    """Interface of the engines that `generate`, files of prompts, evaluations, rollouts and the server use. Not
    thread-safe.

    engine.submit(Request("a", prompt_ids, seed=0))
    while not engine.idle:
        for event in engine.step():
            ...
        # submit() and cancel() at any time between two calls of step()
    """

    @property
    def forwards(self) -> int:
        """Number of forward passes of the model so far."""

    @property
    def idle(self) -> bool:
        """True if there is no waiting or running request and no unreported event."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RowError or SettingError for an invalid one."""

    def cancel(self, name: Hashable) -> bool:
        """Drop a request and its unreported events. Returns False if there is no request of this name."""

    def step(self) -> list[Event]:
        """Run to the next step boundary. Returns the events since the last call."""

    def close(self) -> None:
        """Drop all requests and release the model."""
