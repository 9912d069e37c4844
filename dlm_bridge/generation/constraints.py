"""Logits constraints of a call: penalties, banned and allowed tokens, and the caller's logits processors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from dlm_bridge.errors import SettingError
from dlm_bridge.generation.canvas import Canvas, Columns, to_device
from dlm_bridge.generation.request import MASK

# Settings of transformers' `generate` that are read from calls only: the published samplers ignore them in a
# checkpoint's generation_config.json.
CONSTRAINT_SETTINGS = (
    "bad_words_ids",
    "logits_processor",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "prefix_allowed_tokens_fn",
    "repetition_penalty",
    "suppress_tokens",
)
AllowedTokens = Callable[[Any, torch.Tensor], Sequence[int]]
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class TextDecoder(Protocol):
    """Keeps the text constraints (`request.TextConstraint`) of a run's rows. Rows without one stay unchanged.

    `rows` are A rows of the canvas. Every method works on the device, without synchronisation with the host.
    """

    def propose(
        self,
        rows: list[int],
        columns: Columns,
        logits_ANV: torch.Tensor,
        shaped_ANV: torch.Tensor,
        tokens_AN: torch.Tensor,
        sampling: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Replace proposals that no completion of the row's text contains, and the logits that they come from."""

    def commit(
        self,
        rows: list[int],
        columns: Columns,
        tokens_AN: torch.Tensor,
        logits_ANV: torch.Tensor,
        least: Sequence[int] | None,
    ) -> torch.Tensor:
        """[A, N] tokens to write instead of `tokens_AN`, of which some completion of the row's text contains all. At
        least `least` of the row's changes remain, possibly with another token; None: each row has one change."""

    def follow(
        self, rows: list[int], firsts: list[int], drafts_AM: torch.Tensor, logits_ANV: torch.Tensor
    ) -> torch.Tensor:
        """Logits of N columns from `firsts` on, without the tokens that cannot follow the text before `firsts` and the
        draft's tokens before the column."""

    def finish(
        self, rows: list[int], columns: Columns, logits_ANV: torch.Tensor, tokens_AN: torch.Tensor, sampling: Any
    ) -> torch.Tensor:
        """[A, N] `tokens_AN` if they are a valid text, else a valid text from these logits."""


@dataclass(frozen=True)
class Constraints:
    """Changes the logits of all positions before tokens are proposed. Confidences are computed from the changed
    logits.

    - `repetition_penalty` applies to all committed tokens of the row, including the prompt and later positions.
    - `suppress_tokens`, `bad_words_ids` of one token, and end-of-sequence tokens in the first `min_new_tokens` new
      columns are never proposed.
    - `processors` of the caller are called for each position of the block, including committed ones. `input_ids` [A,
      c] are the tokens before the position, padded on the left, with the mask token at masks; `scores` [A, V] are the
      position's logits.
    - `prefix_allowed_tokens_fn`, `no_repeat_ngram_size` and `bad_words_ids` of several tokens depend on the text
      before a position. With one of these (`ordered`), a step commits one token per row, from left to right, so that
      they have the same effect as in transformers.
    """

    repetition_penalty: float = 1.0
    suppress: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    no_repeat_ngram_size: int = 0
    allowed: AllowedTokens | None = None
    processors: tuple[Processor, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    _everywhere: list[LogitsProcessor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.suppress:
            self._everywhere.append(SuppressTokensLogitsProcessor(list(self.suppress), device="cpu"))
        single = [list(word) for word in self.bad_words if len(word) == 1]
        if single:
            self._everywhere.append(NoBadWordsLogitsProcessor(single))

    def refuse_text(self, reason: str) -> None:
        """Raise SettingError for constraints that depend on committed tokens."""
        asked = {
            "repetition_penalty": self._penalises,
            "prefix_allowed_tokens_fn": self.allowed is not None,
            "no_repeat_ngram_size": self.no_repeat_ngram_size > 0,
            "bad_words_ids": any(len(word) > 1 for word in self.bad_words),
        }
        for name, given in asked.items():
            if given:
                raise SettingError(name, f"is not supported by this sampler: {reason}")

    @property
    def ordered(self) -> bool:
        """True if they depend on the text before a position: tokens are committed from left to right."""
        return self.allowed is not None or self._bans_sequences

    @property
    def by_text(self) -> bool:
        """True if the logits of a position depend on other tokens."""
        return self.ordered or bool(self.processors) or self._penalises

    def __call__(self, logits_ANV: torch.Tensor, canvas: Canvas, rows: list[int], columns: Columns) -> torch.Tensor:
        """Return a copy of the logits of these rows and columns of the canvas, with the constraints applied.

        A row with a position without any allowed token fails alone: its logits become NaN, see `Canvas.fail`.

        Raises:
            SettingError: a logits processor returns another shape.
        """
        if not (self._everywhere or self.ordered or self.processors or self._penalises or self._delays_end):
            return logits_ANV
        logits_ANV = logits_ANV.clone()
        chosen = canvas.selected(rows)
        columns_AN = canvas.columns(chosen, columns)
        if self._penalises:
            self._apply_penalty(logits_ANV, canvas, chosen, columns_AN)
        flat = logits_ANV.flatten(0, 1)
        for processor in self._everywhere:
            flat = processor(columns_AN.reshape(-1, 1), flat)
        logits_ANV = flat.view_as(logits_ANV)
        if self._delays_end:
            new_AN = columns_AN - canvas.first_new(chosen)[:, None]
            early_AN1 = ((new_AN >= 0) & (new_AN < self.min_new_tokens))[..., None]
            ends = to_device(self.eos_token_ids, logits_ANV.device)
            logits_ANV[..., ends] = logits_ANV[..., ends].masked_fill(early_AN1, -torch.inf)
        if self.processors:
            self._run_processors(logits_ANV, canvas, chosen, columns_AN, shared=isinstance(columns, slice))
        if self.ordered:
            self._constrain_by_text(logits_ANV, canvas, chosen, columns_AN)
        return logits_ANV

    @property
    def _penalises(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def _bans_sequences(self) -> bool:
        return self.no_repeat_ngram_size > 0 or any(len(word) > 1 for word in self.bad_words)

    @property
    def _delays_end(self) -> bool:
        return self.min_new_tokens > 0 and bool(self.eos_token_ids)

    def _apply_penalty(
        self, logits_ANV: torch.Tensor, canvas: Canvas, rows: list[int] | None, columns_AN: torch.Tensor
    ) -> None:
        positions = columns_AN.shape[1]
        seen_ANS = canvas.take(rows, slice(0, canvas.width))[:, None].repeat(1, positions, 1)
        seen_ANS.scatter_(2, columns_AN[..., None], MASK)  # a token does not repeat itself
        # An extra token represents masks and padding.
        vocabulary = logits_ANV.shape[-1]
        padded_ANV = torch.nn.functional.pad(logits_ANV, (0, 1))
        penalise = RepetitionPenaltyLogitsProcessor(self.repetition_penalty)
        penalised = penalise(
            seen_ANS.masked_fill(seen_ANS == MASK, vocabulary).flatten(0, 1), padded_ANV.flatten(0, 1)
        )
        logits_ANV.copy_(penalised.view_as(padded_ANV)[..., :vocabulary])

    def _run_processors(
        self,
        logits_ANV: torch.Tensor,
        canvas: Canvas,
        rows: list[int] | None,
        columns_AN: torch.Tensor,
        *,
        shared: bool,
    ) -> None:
        """Run the caller's processors. `shared`: the columns are the same in all rows."""
        tokens_AS = canvas.take(rows, slice(0, canvas.width))
        tokens_AS = tokens_AS.masked_fill(tokens_AS == MASK, canvas.mask_token_id or 0)
        tokens_AS = tokens_AS.masked_fill(~canvas.real(rows), self.pad_token_id)
        count = len(tokens_AS)
        groups = [slice(0, count)] if shared else [slice(row, row + 1) for row in range(count)]
        origins = canvas.origins if rows is None else [canvas.origins[row] for row in rows]
        columns = columns_AN[:1].tolist() if shared else columns_AN.tolist()
        for group, own in zip(groups, columns, strict=True):
            first = min(origins[group])
            for place, column in enumerate(own):
                scores_AV = logits_ANV[group, place]
                for processor in self.processors:
                    shape = scores_AV.shape
                    scores_AV = processor(tokens_AS[group, first:column], scores_AV)
                    if not isinstance(scores_AV, torch.Tensor) or scores_AV.shape != shape:
                        raise SettingError(
                            "logits_processor",
                            f"{type(processor).__name__} must return scores of shape {tuple(shape)}",
                        )
                logits_ANV[group, place] = scores_AV
        self._fail_without_token(logits_ANV, canvas, rows, columns_AN)

    def _fail_without_token(
        self, logits_ANV: torch.Tensor, canvas: Canvas, rows: list[int] | None, columns_AN: torch.Tensor
    ) -> None:
        """Fail rows in which the processors exclude all tokens of a mask."""
        others_V = torch.arange(logits_ANV.shape[-1], device=logits_ANV.device) != canvas.excluded_token_id
        some_AN = ((logits_ANV != -torch.inf) & others_V).any(dim=-1)  # rows with NaN fail later
        for row, place in (canvas.masked(rows, columns_AN) & ~some_AN).nonzero().tolist():
            before = int(canvas.places(rows)[row, columns_AN[row, place]])
            canvas.fail(
                canvas.names[row if rows is None else rows[row]],
                f"`logits_processor` excludes all tokens after the first {before}: at least one score must be above "
                "minus infinity",
            )
            logits_ANV[row, place] = torch.nan

    def _constrain_by_text(
        self, logits_ANV: torch.Tensor, canvas: Canvas, rows: list[int] | None, columns_AN: torch.Tensor
    ) -> None:
        """Constrain each row's first mask, which this step commits."""
        place_A1 = canvas.masked(rows, columns_AN).int().argmax(dim=1, keepdim=True)
        index_A1V = place_A1[..., None].expand(-1, 1, logits_ANV.shape[-1])
        tokens_AS, begin_A1 = canvas.take(rows, slice(0, canvas.width)), canvas.origin(rows)[:, None]
        stop_A1 = columns_AN.gather(1, place_A1)
        scores_AV = logits_ANV.gather(1, index_A1V)[:, 0]
        if self._bans_sequences:
            banned_AV = self._end_of_sequences(tokens_AS, begin_A1, stop_A1, scores_AV)
            scores_AV = scores_AV.masked_fill(banned_AV, -torch.inf)
        names = canvas.names if rows is None else [canvas.names[row] for row in rows]
        if self.allowed is not None:
            columns_S = torch.arange(tokens_AS.shape[1], device=tokens_AS.device)
            before_AS = (columns_S >= begin_A1) & (columns_S < stop_A1)
            texts = tokens_AS[before_AS].split(before_AS.sum(dim=1).tolist())
            answers = [self.allowed(name, text) for name, text in zip(names, texts, strict=True)]
            scores_AV = _only_allowed(scores_AV, answers, names)
        others_V = torch.arange(scores_AV.shape[1], device=scores_AV.device) != canvas.excluded_token_id
        nothing_A = ~((scores_AV != -torch.inf) & others_V).any(dim=1)
        for row in nothing_A.nonzero()[:, 0].tolist():
            length = int(stop_A1[row] - begin_A1[row])
            canvas.fail(
                names[row],
                f"the constraints (`prefix_allowed_tokens_fn`, `no_repeat_ngram_size`, `bad_words_ids`) exclude all "
                f"tokens after the first {length}",
            )
            scores_AV[row] = torch.nan
        logits_ANV.scatter_(1, index_A1V, scores_AV[:, None])

    def _end_of_sequences(
        self, tokens_AS: torch.Tensor, begin_A1: torch.Tensor, stop_A1: torch.Tensor, scores_AV: torch.Tensor
    ) -> torch.Tensor:
        """[A, V], True at tokens that complete a bad word or repeat an n-gram after the text from column `begin` up to
        `stop`."""
        count, vocabulary = scores_AV.shape
        # The last column is unused.
        banned_AV = torch.zeros(count, vocabulary + 1, dtype=torch.bool, device=scores_AV.device)
        size = self.no_repeat_ngram_size
        if 0 < size <= tokens_AS.shape[1]:
            grams_AWN = tokens_AS.unfold(1, size, 1)
            first_W = torch.arange(grams_AWN.shape[1], device=tokens_AS.device)
            repeated_AW = _follows(tokens_AS, begin_A1, stop_A1, grams_AWN[..., :-1])
            repeated_AW = repeated_AW & (first_W >= begin_A1) & (first_W + size <= stop_A1)
            last_AW = grams_AWN[..., -1]
            banned_AV.scatter_(1, torch.where(repeated_AW & (last_AW != MASK), last_AW, vocabulary), True)
        for length in {len(word) for word in self.bad_words} - {1}:
            words = [word for word in self.bad_words if len(word) == length]
            words_WN = to_device([token for word in words for token in word], tokens_AS.device).view(-1, length)
            completes_AW = _follows(tokens_AS, begin_A1, stop_A1, words_WN[None, :, :-1])
            last_AW = words_WN[:, -1].expand_as(completes_AW)
            banned_AV.scatter_(1, torch.where(completes_AW, last_AW, vocabulary), True)
        return banned_AV[:, :-1]


def _follows(
    tokens_AS: torch.Tensor, begin_A1: torch.Tensor, stop_A1: torch.Tensor, sequences_AWN: torch.Tensor
) -> torch.Tensor:
    """[A, W], True if the text from column `begin` up to `stop` ends with the sequence."""
    length = sequences_AWN.shape[-1]
    columns_AN = stop_A1 - length + torch.arange(length, device=tokens_AS.device)
    last_AN = tokens_AS.gather(1, columns_AN.clamp(min=0))
    return (sequences_AWN == last_AN[:, None]).all(dim=-1) & (stop_A1 - begin_A1 >= length)


def _only_allowed(scores_AV: torch.Tensor, allowed: Sequence[Any], names: Sequence[Any]) -> torch.Tensor:
    """Scores of each row's allowed tokens, minus infinity elsewhere. Raises SettingError."""
    vocabulary, index = scores_AV.shape[1], []
    for row, (answer, name) in enumerate(zip(allowed, names, strict=True)):
        try:
            tokens = [int(token) for token in (answer.tolist() if isinstance(answer, torch.Tensor) else answer)]
        except (TypeError, ValueError):
            raise SettingError(
                "prefix_allowed_tokens_fn", f"must return a list of token ids, not {answer!r} (row {name})"
            ) from None
        outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise SettingError(
                "prefix_allowed_tokens_fn",
                f"allows token {outside}, outside the vocabulary of {vocabulary} (row {name})",
            )
        index += [row * vocabulary + token for token in tokens]
    kept_AV = torch.zeros_like(scores_AV, dtype=torch.bool)
    kept_AV.view(-1)[to_device(index, scores_AV.device)] = True
    return scores_AV.masked_fill(~kept_AV, -torch.inf)


def read_constraints(
    asked: Callable[[str], Any],
    *,
    prompt_width: int,
    vocabulary_size: int,
    excluded_token_id: int,
    eos_token_ids: tuple[int, ...],
    pad_token_id: int,
    suppress: tuple[int, ...] = (),
) -> Constraints:
    """Build the constraints of a call.

    Args:
        asked: returns the value of one of `CONSTRAINT_SETTINGS`, or None.
        excluded_token_id: token that is never proposed; negative: none.
        suppress: tokens that the sampler bans.

    Raises:
        SettingError: a value is invalid.
    """
    penalty = asked("repetition_penalty")
    number = isinstance(penalty, (int, float)) and not isinstance(penalty, bool)
    if penalty is not None and not (number and 0 < penalty <= sys.float_info.max):
        raise SettingError("repetition_penalty", f"must be a number above 0, not {penalty!r}")
    counts = {}
    for name in ("min_new_tokens", "min_length", "no_repeat_ngram_size"):
        counts[name] = asked(name) or 0
        if type(counts[name]) is not int or not 0 <= counts[name] < 2**63:
            raise SettingError(name, f"must be a whole number, 0 or above, not {counts[name]!r}")
    words = asked("bad_words_ids") or []
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, (list, tuple)) and word for word in words):
        raise SettingError("bad_words_ids", f"must be a list of lists of token ids, not {words!r}")
    banned = asked("suppress_tokens")
    banned = [] if banned is None else banned.tolist() if isinstance(banned, torch.Tensor) else banned
    if not isinstance(banned, (list, tuple)):
        raise SettingError("suppress_tokens", f"must be a list of token ids, not {banned!r}")
    for name, tokens in (("bad_words_ids", [token for word in words for token in word]), ("suppress_tokens", banned)):
        wrong = [token for token in tokens if type(token) is not int or not 0 <= token < vocabulary_size]
        if wrong:
            raise SettingError(name, f"contains {wrong[0]!r}, outside the vocabulary of {vocabulary_size}")
    ends = tuple(token for token in eos_token_ids if token < vocabulary_size)  # models propose no others
    fewest = max(counts["min_new_tokens"], counts["min_length"] - prompt_width)
    never = {*suppress, *banned, *(word[0] for word in words if len(word) == 1), *(ends if fewest > 0 else ())}
    if never | {excluded_token_id} >= {*range(vocabulary_size)}:
        raise SettingError(
            "suppress_tokens",
            f"excludes all {vocabulary_size} tokens, together with `bad_words_ids` and `min_new_tokens`",
        )
    allowed = asked("prefix_allowed_tokens_fn")
    processors = asked("logits_processor")
    processors = [] if processors is None else list(processors) if isinstance(processors, list) else [processors]
    for name, hook in [("prefix_allowed_tokens_fn", allowed), *(("logits_processor", one) for one in processors)]:
        if hook is not None and not callable(hook):
            raise SettingError(name, f"must be callable, not {hook!r}")
    return Constraints(
        repetition_penalty=float(penalty or 1.0),
        suppress=tuple(dict.fromkeys([*suppress, *banned])),
        bad_words=tuple(tuple(word) for word in words),
        min_new_tokens=fewest,
        no_repeat_ngram_size=counts["no_repeat_ngram_size"],
        allowed=allowed,
        processors=tuple(processors),
        eos_token_ids=ends,
        pad_token_id=pad_token_id,
    )
