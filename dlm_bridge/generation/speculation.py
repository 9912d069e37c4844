"""Speculative decoding by one model: it drafts a block that sees all of itself, then checks it as a causal model.

A step has the last settled token and masks behind it. The draft fills the masks, looking at the whole block and at
all that is settled; the check reads the filled block causally and says, behind each of its tokens, what the
autoregressive model would go on with. Its tokens are settled as far as the draft has foreseen them, and the first that
it has not: what is settled is the autoregressive model's own text, several tokens at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.attention_mask import causal_mask
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import Canvas, to_device
from dlm_bridge.generation.commit_rules import MINUS_INFINITY, SamplerContext, best
from dlm_bridge.generation.draft_adapter import DraftAdapter
from dlm_bridge.generation.kv_cache import CacheMode
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.runtime.runner import CanvasView, ModelRunner
from dlm_bridge.generation.token_sampling import probability_of, propose_tokens

# Rows that have got to different columns look at so many at once more than they must, so that shapes come again.
COLUMNS = 256


@dataclass(frozen=True)
class SpeculativeRule:
    """How a draft is made.

    Args:
        block_length: the last settled token and the masks behind it.
        threshold: 0: one forward fills every mask. Above: each forward fills those whose probability reaches it, the
            surest one at least.
    """

    edits: ClassVar[bool] = False  # what the check settles stays

    block_length: int
    threshold: float = 0.0


class SpeculativePredictor(Predictor):
    """Causal attention, but in drafts, where a row's block sees all of itself. Rows have blocks of their own, which
    begin at the columns that they are asked for with.

    With the cache "block" keys and values of what is settled are kept as the check has made them. Those of tokens that
    it did not settle, and of drafts, stand behind, where the next block writes its own before anyone looks.
    """

    caches: ClassVar[tuple[CacheMode, ...]] = ("none", "block")

    def __init__(
        self,
        runner: ModelRunner,
        canvas: Canvas,
        *,
        shift: bool,
        cache: CacheMode = "none",
        adapter: str | None = None,
    ) -> None:
        super().__init__(runner, canvas, shift=shift, cache=cache)
        if adapter is not None and cache == "none":
            raise DlmBridgeError(
                f"draft_adapter {adapter!r} drafts behind keys and values that the model has kept without it: "
                "use cache 'block'"
            )
        self._adapter = DraftAdapter(runner.model, adapter)
        self._rows = canvas.rows  # whose keys and values are kept

    def prompt(self) -> torch.Tensor:
        """[B, 1, V], the causal model's logits of each row's first new token."""
        stop = self.canvas.starts[0]  # as every row's
        positions, real = self._positions(None, stop)
        view = CanvasView(self.canvas.take(None, slice(0, stop)), causal_mask(real), positions, 0, stop)
        with self._adapter.off():
            if self._cache == "none":
                return self._runner.logits(view, slice(stop - 1, stop))
            return self._runner.head(self._runner.hidden(view, once=True), slice(stop - 1, stop))

    def draft(self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor) -> torch.Tensor:
        """[A, N, V], the denoiser's logits of the rows' blocks, which begin at the columns `firsts`."""
        with self._adapter.on():
            return self._logits_of_blocks(rows, firsts, tokens_AN, draft=True)

    def check(self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor) -> torch.Tensor:
        """[A, N, V], the causal model's logits of what comes behind each token of the rows' blocks."""
        with self._adapter.off():
            return self._logits_of_blocks(rows, firsts, tokens_AN, draft=False)

    def drop_all_but(self, rows: list[int]) -> None:
        """Go on with these of the canvas' rows; others do not come back."""
        if self._cache != "none" and len(rows) < len(self._rows):
            self._runner.keep([self._rows.index(row) for row in rows])
        self._rows = rows

    def _logits_of_blocks(
        self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor, *, draft: bool
    ) -> torch.Tensor:
        assert rows == self._rows, "what is kept is that of every row"
        own_AN = columns_from(firsts, tokens_AN.shape[1], tokens_AN.device)
        if self._cache == "none":
            return self._runner.reordered_logits(self._view_of_all(rows, firsts, tokens_AN, own_AN, draft), own_AN)
        view = self._view_of_blocks(rows, firsts, tokens_AN, own_AN, draft)
        return self._runner.head(self._runner.hidden(view), slice(None))

    def _view_of_all(
        self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor, own_AN: torch.Tensor, draft: bool
    ) -> CanvasView:
        stop = max(firsts) + tokens_AN.shape[1]
        positions_AS, real_AS = self._positions(rows, stop)
        tokens_AS = self.canvas.take(rows, slice(0, stop)).scatter(1, own_AN, tokens_AN)
        mask = causal_mask(real_AS)
        if draft:
            inside_AS = torch.zeros_like(real_AS).scatter(1, own_AN, True)
            mask = mask | (inside_AS[:, None, :, None] & inside_AS[:, None, None, :])
        return CanvasView(tokens_AS, mask, positions_AS, 0, stop)

    def _view_of_blocks(
        self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor, own_AN: torch.Tensor, draft: bool
    ) -> CanvasView:
        width, stop = tokens_AN.shape[1], max(firsts) + tokens_AN.shape[1]
        variant = self._adapter.variant(draft)
        if min(firsts) == max(firsts):  # one range of columns: attention needs no mask but that of padding
            positions_AS, real_AS = self._positions(rows, stop)
            seen = real_AS if self.canvas.padded else None
            block = None if draft else 1
            return CanvasView(
                tokens_AN, seen, positions_AS[:, firsts[0] :], firsts[0], stop, block=block, variant=variant
            )
        stop = min(-(-stop // COLUMNS) * COLUMNS, self.canvas.width)
        positions_AS, real_AS = self._positions(rows, stop)
        limit_AN = own_AN[:, -1:].expand(-1, width) if draft else own_AN
        seen_ANS = (torch.arange(stop, device=own_AN.device) <= limit_AN[..., None]) & real_AS[:, None]
        positions_AN = positions_AS.gather(1, own_AN)
        return CanvasView(tokens_AN, seen_ANS[:, None], positions_AN, end=stop, columns=own_AN, variant=variant)


def speculate_block(work: SamplerContext, block: slice) -> None:
    """Settle the block, all of the new tokens, in steps of a draft and its check. A row leaves when it has ended."""
    canvas, predictor = work.canvas, work.predictor
    assert isinstance(predictor, SpeculativePredictor)
    _refuse_empty(canvas)
    rows, firsts = canvas.rows, [start - 1 for start in canvas.starts]
    logits_ANV = predictor.prompt()
    drafts_AN = canvas.take(None, slice(firsts[0], firsts[0] + 1))
    while True:
        settled_A = _commit(work, block, rows, firsts, drafts_AN, logits_ANV)
        counts = (settled_A * canvas.unfinished(rows, block)).tolist()
        firsts = [first + count for first, count in zip(firsts, counts, strict=True) if count]
        rows = [row for row, count in zip(rows, counts, strict=True) if count]
        if not rows:
            return
        predictor.drop_all_but(rows)
        drafts_AN = _drafts(work, predictor, rows, firsts)
        logits_ANV = predictor.check(rows, firsts, drafts_AN)


def columns_from(firsts: list[int], width: int, device: torch.device) -> torch.Tensor:
    """[A, width] columns of the canvas, each row's from its own first one on."""
    return to_device(firsts, device)[:, None] + torch.arange(width, device=device)


def _refuse_empty(canvas: Canvas) -> None:
    for row, (origin, start) in enumerate(zip(canvas.origins, canvas.starts, strict=True)):
        if origin == start:
            raise DlmBridgeError(
                f"input_ids row {row} has no tokens, a causal model goes on from one: begin with bos_token_id"
            )


def _drafts(work: SamplerContext, predictor: SpeculativePredictor, rows: list[int], firsts: list[int]) -> torch.Tensor:
    """[A, N] tokens: the last settled one of each row, and guesses at what comes behind it."""
    canvas, rule, sampling = work.canvas, work.recipe.rule, work.recipe.sampling
    assert isinstance(rule, SpeculativeRule)
    columns_AN = columns_from(firsts, rule.block_length, canvas.tokens.device)
    drafts_AN = canvas.take(rows, columns_AN)
    going = list(range(len(rows))) if rule.block_length > 1 else []  # places in `rows`
    while going:
        some = [rows[place] for place in going]
        which = slice(None) if some == rows else going  # of all rows nothing is copied
        columns = columns_AN[which, 1:]
        logits = predictor.draft(rows, firsts, drafts_AN)[which, 1:]
        if not work.constraints.by_text:  # else the check alone keeps them: a draft has no text before its tokens yet
            logits = work.constraints(logits, canvas, some, columns)
        shaped, tokens = propose_tokens(logits, canvas, some, columns, sampling, work.noise)
        before = drafts_AN[which, 1:]
        chosen = before == canvas.mask_token_id
        if rule.threshold:
            sure = probability_of(tokens, shaped).masked_fill(~chosen, MINUS_INFINITY)
            chosen = (sure >= rule.threshold) | best(sure)
        drafts_AN[which, 1:] = torch.where(chosen, tokens, before)
        work.observer.step(canvas, some, columns, logits, predictor.forwards, final=False)
        if not rule.threshold:
            break
        masked_A = (drafts_AN[which] == canvas.mask_token_id).any(dim=1)
        going = [place for place, masked in zip(going, masked_A.tolist(), strict=True) if masked]
    return drafts_AN


def _commit(
    work: SamplerContext,
    block: slice,
    rows: list[int],
    firsts: list[int],
    drafts_AN: torch.Tensor,
    logits_ANV: torch.Tensor,
) -> torch.Tensor:
    """Settle what the check gives, by its logits, as far as the drafts have foreseen it, and one token more.

    Returns [A], how many tokens that are; of rows that end before, those until then or more.
    """
    canvas = work.canvas
    columns_AN = columns_from(firsts, drafts_AN.shape[1], drafts_AN.device) + 1
    if work.constraints.by_text:
        settled_A, logits_ANV = _commit_one_by_one(work, block, rows, columns_AN, drafts_AN, logits_ANV)
    else:
        logits_ANV = work.constraints(logits_ANV, canvas, rows, columns_AN)
        _, tokens_AN = propose_tokens(logits_ANV, canvas, rows, columns_AN, work.recipe.sampling, work.noise)
        settled_A = 1 + (tokens_AN[:, :-1] == drafts_AN[:, 1:]).cumprod(dim=1).sum(dim=1)
        foreseen_AN = torch.arange(drafts_AN.shape[1], device=drafts_AN.device) < settled_A[:, None]
        canvas.put(rows, columns_AN, torch.where(foreseen_AN, tokens_AN, canvas.mask_token_id))
    work.observer.step(canvas, rows, columns_AN, logits_ANV, work.predictor.forwards, final=True)
    return settled_A


def _commit_one_by_one(
    work: SamplerContext,
    block: slice,
    rows: list[int],
    columns_AN: torch.Tensor,
    drafts_AN: torch.Tensor,
    logits_ANV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for constraints that look at the text before a token: they are shown no more than what is settled.

    Returns the logits that they have left, too.
    """
    canvas, logits_ANV = work.canvas, logits_ANV.clone()
    settled_A = torch.zeros_like(columns_AN[:, 0])
    going = list(range(len(rows)))  # places in `rows`
    for place in range(columns_AN.shape[1]):
        some, columns = [rows[one] for one in going], columns_AN[going, place : place + 1]
        logits = work.constraints(logits_ANV[going, place : place + 1], canvas, some, columns)
        _, tokens = propose_tokens(logits, canvas, some, columns, work.recipe.sampling, work.noise)
        canvas.put(some, columns, tokens)
        logits_ANV[going, place : place + 1] = logits
        settled_A[going] += 1
        if place + 1 == columns_AN.shape[1]:
            break
        foreseen = (tokens[:, 0] == drafts_AN[going, place + 1]) & canvas.unfinished(some, block)
        going = [one for one, on in zip(going, foreseen.tolist(), strict=True) if on]
        if not going:
            break
    return settled_A, logits_ANV
