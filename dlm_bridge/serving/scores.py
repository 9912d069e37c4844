"""Log probabilities of a request's tokens, and likelihood bounds of its text, on request."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.evaluation.likelihood import Answer, LikelihoodBound, likelihood_bounds
from dlm_bridge.generation.canvas import Canvas, Columns, to_device
from dlm_bridge.generation.request import MASK, Ended, Engine, Event, Extended, Failed, Request

UNLIKELY = -9999.0  # OpenAI's value for a token without a log probability, as JSON has no minus infinity
MAX_TOP = 20  # most probable tokens per position, as in OpenAI's API
MAX_SAMPLES = 128  # of a bound


@dataclass(frozen=True)
class TokenScore:
    """Log probability of a token, and the most probable tokens at its position with theirs, the best first."""

    token: int
    logprob: float = UNLIKELY
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Scored:
    """Event: scores of a request's tokens from position `first` on. It precedes the event with the tokens."""

    name: Any
    first: int
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True)
class Bounded:
    """Event: the bound of a request's log-likelihood, before its end."""

    name: Any
    bound: LikelihoodBound


def token_scores(logits_MV: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """Scores of M tokens by their log-softmax in float32, with the `top` most probable tokens."""
    logs_MV = logits_MV.float().log_softmax(dim=-1)
    own_M = logs_MV.gather(1, to_device(tokens, logs_MV.device)[:, None])[:, 0].tolist()
    best = logs_MV.topk(min(top, logs_MV.shape[1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenScore(token, _finite(own), tuple(zip(ids, map(_finite, values), strict=True)))
        for token, own, (ids, values) in zip(tokens, own_M, tops, strict=True)
    ]


def _finite(value: float) -> float:
    return max(value, UNLIKELY) if value == value else UNLIKELY  # NaN: the request fails


class ScoreRecorder:
    """Observer of an engine (`StepObserver`) that keeps the score of each token, by the unconstrained logits of its
    position in the step that committed it, or changed it last. Each step waits for the device."""

    unconstrained = True

    def __init__(self, top: int) -> None:
        self._top = top
        self._scores: dict[Hashable, dict[int, TokenScore]] = {}  # of running rows, by position

    def step(
        self,
        canvas: Canvas,
        rows: list[int],
        columns: Columns,
        logits_ANV: torch.Tensor,
        forwards: int,
        *,
        final: bool,
    ) -> None:
        """See `StepObserver`."""
        tokens_AN = canvas.take(rows, columns).tolist()
        new_AN = canvas.behind_prompt(rows, columns).tolist()
        columns_AN = canvas.columns(rows, columns).tolist()
        sources_AN = None if canvas.moved is None else canvas.moved.tolist()
        firsts = canvas.firsts
        places: list[tuple[int, int]] = []  # of changed tokens in the logits
        changed: list[tuple[dict[int, TokenScore], int, int]] = []  # their rows' scores, positions and tokens
        for number, row in enumerate(rows):
            scores = self._scores.setdefault(canvas.names[row], {})
            positions = [column - firsts[row] for column in columns_AN[number]]
            sources = range(len(positions)) if sources_AN is None else sources_AN[number]
            before = [scores.pop(position, None) for position in positions]
            for place, token in enumerate(tokens_AN[number]):
                known = before[sources[place]]
                if token == MASK or not new_AN[number][place]:
                    continue
                if known is not None and known.token == token:  # a moved token keeps its score
                    scores[positions[place]] = known
                else:
                    places.append((number, sources[place]))
                    changed.append((scores, positions[place], token))
        if places:
            rows_M, places_M = to_device(torch.tensor(places), logits_ANV.device).T
            found = token_scores(logits_ANV[rows_M, places_M], [token for *_, token in changed], self._top)
            for (scores, position, _), score in zip(changed, found, strict=True):
                scores[position] = score

    def block(self, canvas: Canvas, rows: list[int]) -> None:
        """See `StepObserver`."""

    def draft(self, name: Hashable, first: int, tokens: Sequence[int], logits_QV: torch.Tensor) -> None:
        """Score the tokens of a completed draft of DiffusionGemma, from position `first` on."""
        found = token_scores(logits_QV, tokens, self._top)
        self._scores.setdefault(name, {}).update(enumerate(found, first))

    def scores(self, name: Hashable, first: int, tokens: Sequence[int]) -> tuple[TokenScore, ...]:
        """Scores of a row's tokens from position `first` on."""
        known = self._scores.get(name, {})
        found = (known.get(position) for position in range(first, first + len(tokens)))
        return tuple(
            score if score is not None and score.token == token else TokenScore(token)
            for score, token in zip(found, tokens, strict=True)
        )

    def forget(self, name: Hashable) -> None:
        """Drop the scores of a row."""
        self._scores.pop(name, None)


class ScoringEngine:
    """Wraps an engine: `Scored` and `Bounded` events precede the engine's own events.

    Args:
        recorder: the engine's observer; None: the model is autoregressive, and one forward pass scores a whole text
            when it has ended.
        top: number of most probable tokens per position; None: no scores.
        samples: forward passes of each bound; 0: no bounds.
    """

    def __init__(
        self, engine: Engine, model: Any, recorder: ScoreRecorder | None, top: int | None, samples: int
    ) -> None:
        self._engine, self._model, self._recorder, self._top, self._samples = engine, model, recorder, top, samples
        self._prompts: dict[Hashable, tuple[int, ...]] = {}

    @property
    def forwards(self) -> int:
        return self._engine.forwards

    @property
    def idle(self) -> bool:
        return self._engine.idle

    def submit(self, request: Request) -> None:
        self._engine.submit(request)
        self._prompts[request.name] = tuple(request.prompt)

    def cancel(self, name: Hashable) -> bool:
        self._forget(name)
        return self._engine.cancel(name)

    def step(self) -> list[Event]:
        return list(self.scored(self._engine.step()))

    def close(self) -> None:
        self._engine.close()

    def scored(self, events: Sequence[Event]) -> Iterable[Any]:
        """The events, each after the scores of its tokens."""
        for event in events:
            if isinstance(event, Extended) and self._recorder is not None:
                yield Scored(event.name, event.first, self._recorder.scores(event.name, event.first, event.tokens))
            if isinstance(event, Ended):
                yield from self._of_text(event)
            if isinstance(event, Ended | Failed):
                self._forget(event.name)
            yield event

    def _of_text(self, event: Ended) -> Iterable[Any]:
        prompt = self._prompts[event.name]
        if self._top is not None:
            if self._recorder is not None:
                scores = self._recorder.scores(event.name, 0, event.tokens)
            else:
                scores = _causal_scores(self._model, prompt, event.tokens, self._top)
            yield Scored(event.name, 0, scores)
        if self._samples and event.tokens:
            answer = Answer(prompt, event.tokens)
            yield Bounded(event.name, likelihood_bounds(self._model, [answer], self._samples)[0])

    def _forget(self, name: Hashable) -> None:
        self._prompts.pop(name, None)
        if self._recorder is not None:
            self._recorder.forget(name)


@torch.no_grad()
def _causal_scores(model: Any, prompt: Sequence[int], tokens: Sequence[int], top: int) -> tuple[TokenScore, ...]:
    """Scores of a text by one forward pass of an autoregressive model: exact."""
    if not tokens:
        return ()
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device="cpu" if device.type == "meta" else device)
    logits_SV = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return tuple(token_scores(logits_SV, tokens, top))
