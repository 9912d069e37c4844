"""Nemotron-Labs-Diffusion's linear self-speculation: speculative decoding by one model.

    text = prompt + causal model's next token
    while a new token is missing:
        draft = [last token] + [MASK] * (block_length - 1)
        fill the masks of draft with the denoiser, whose block attends to all of itself and to the text
            # threshold 0: in one forward pass; above: each pass fills what has probability >= threshold, and the best
        check = causal model's next tokens behind each token of draft
        commit check as far as draft predicted it, and the first token that it did not

At temperature 0 the text is the causal model's own, token for token; above, it is drawn from that model.

Source: the model's `linear_spec_generate`, in its modeling code on the Hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern, causal_mask
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import BlockLayout, Canvas, to_device
from dlm_bridge.generation.commit_rules import MINUS_INFINITY, DenoisingRule, SamplerContext, best
from dlm_bridge.generation.kv_cache import KVCache
from dlm_bridge.generation.predictors import RowCachePredictor
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.runtime.runner import CanvasView, ModelRunner
from dlm_bridge.generation.runtime.varlen import Packing
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import probability_of, propose_tokens

# Rows in different columns attend to a multiple of so many columns, so that shapes recur.
COLUMN_MULTIPLE = 256


@dataclass(frozen=True, kw_only=True)
class LinearSpecSampler(Sampler):
    """The model's `linear_spec_generate`.

    Args:
        block_length: tokens of a draft, the last committed one included.
        threshold: 0: one forward pass fills the draft. Above: each pass fills what has at least this probability.
        draft_adapter: name of the model's PEFT adapter that is active in drafts only, as the published
            `linear_spec_lora` is.
    """

    name: ClassVar[str] = "linear_spec"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("nemotron_labs_diffusion",)
    infills: ClassVar[bool] = False  # what follows is not attended to
    model_blocks: ClassVar[bool] = True
    takes_commit_rule: ClassVar[bool] = False

    block_length: int = parameter(32, minimum=1)
    threshold: float = parameter(0.0, minimum=0)
    draft_adapter: str | None = None

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        spare = self.block_length - 1  # what a check may predict behind the last new token
        return SamplerSpec(
            layout=BlockLayout(None, spare=spare),
            rule=SpeculativeRule(self.block_length, self.threshold),
            sampling=self.sampling(),
            predictor=SpeculativePredictor,
            predictor_options={"adapter": self.draft_adapter},
        )


@dataclass(frozen=True)
class SpeculativeRule(DenoisingRule):
    """Denoises in steps of a draft and its check; see `LinearSpecSampler` for the arguments."""

    needs_prompt: ClassVar[bool] = True

    block_length: int
    threshold: float = 0.0

    def begin_block(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Commit the causal model's first token. The block is all of the new tokens."""
        canvas, predictor = context.canvas, context.predictor
        assert isinstance(predictor, SpeculativePredictor)
        predictor.begin(rows)
        firsts = predictor.firsts(rows)
        last_A1 = canvas.take(rows, columns_from(firsts, 1, canvas.tokens.device))
        return self._go_on(context, block, rows, firsts, last_A1, predictor.prompt(rows))

    def denoise_step(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """A draft and its check."""
        predictor = context.predictor
        assert isinstance(predictor, SpeculativePredictor)
        predictor.keep_rows(rows)
        firsts = predictor.firsts(rows)
        drafts_AN = self._draft(context, predictor, rows, firsts)
        return self._go_on(context, block, rows, firsts, drafts_AN, predictor.check(rows, firsts, drafts_AN))

    def _go_on(
        self,
        context: SamplerContext,
        block: slice,
        rows: list[int],
        firsts: list[int],
        drafts_AN: torch.Tensor,
        logits_ANV: torch.Tensor,
    ) -> list[int]:
        """Commit what the check allows; the rows that have not ended."""
        predictor = context.predictor
        assert isinstance(predictor, SpeculativePredictor)
        committed_A = self._commit(context, block, rows, firsts, drafts_AN, logits_ANV)
        counts = context.canvas.read_unfinished(rows, block, context.read, partial(torch.mul, committed_A))
        return predictor.advance(rows, counts)

    def _draft(
        self, context: SamplerContext, predictor: SpeculativePredictor, rows: list[int], firsts: list[int]
    ) -> torch.Tensor:
        """[A, N] tokens: the last committed one of each row, and the drafted ones behind it."""
        canvas = context.canvas
        columns_AN = columns_from(firsts, self.block_length, canvas.tokens.device)
        drafts_AN = canvas.take(rows, columns_AN)
        going = list(range(len(rows))) if self.block_length > 1 else []  # places in `rows`
        by_text = context.constraints is not None and context.constraints.by_text
        while going:
            some = [rows[place] for place in going]
            # Of all rows nothing is copied.
            which = slice(None) if some == rows else to_device(going, columns_AN.device)
            columns = columns_AN[which, 1:]
            logits = predictor.draft(rows, firsts, drafts_AN)[which, 1:]
            # Constraints by text hold in the check alone: a draft has no text before its tokens yet.
            if not by_text:
                logits = context.constrain(logits, some, columns)
            shaped, tokens = propose_tokens(logits, canvas, some, columns, context.sampling, context.noise)
            before = drafts_AN[which, 1:]
            picked = before == MASK
            if self.threshold:
                scores = probability_of(tokens, shaped).masked_fill(~picked, MINUS_INFINITY)
                picked = (scores >= self.threshold) | best(scores)
            drafts_AN[which, 1:] = torch.where(picked, tokens, before)
            context.report(some, columns, logits, final=False)
            if not self.threshold:
                break
            masked_A = (drafts_AN[which] == MASK).any(dim=1)
            going = [place for place, masked in zip(going, masked_A.tolist(), strict=True) if masked]
        return drafts_AN

    def _commit(
        self,
        context: SamplerContext,
        block: slice,
        rows: list[int],
        firsts: list[int],
        drafts_AN: torch.Tensor,
        logits_ANV: torch.Tensor,
    ) -> torch.Tensor:
        """Commit the check's tokens as far as the drafts predicted them, and one token more.

        Returns [A], how many tokens that are; of rows that end before, those until then or more.
        """
        canvas = context.canvas
        columns_AN = columns_from(firsts, drafts_AN.shape[1], drafts_AN.device) + 1
        if context.constraints is not None and context.constraints.by_text:
            committed_A, logits_ANV = self._commit_one_by_one(context, block, rows, columns_AN, drafts_AN, logits_ANV)
        else:
            logits_ANV = context.constrain(logits_ANV, rows, columns_AN)
            _, tokens_AN = propose_tokens(logits_ANV, canvas, rows, columns_AN, context.sampling, context.noise)
            committed_A = 1 + (tokens_AN[:, :-1] == drafts_AN[:, 1:]).cumprod(dim=1).sum(dim=1)
            accepted_AN = torch.arange(drafts_AN.shape[1], device=drafts_AN.device) < committed_A[:, None]
            canvas.put(rows, columns_AN, torch.where(accepted_AN, tokens_AN, MASK))
        context.report(rows, columns_AN, logits_ANV, final=True)
        return committed_A

    def _commit_one_by_one(
        self,
        context: SamplerContext,
        block: slice,
        rows: list[int],
        columns_AN: torch.Tensor,
        drafts_AN: torch.Tensor,
        logits_ANV: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for constraints by text, which see committed tokens only. Returns the constrained logits, too."""
        canvas, logits_ANV = context.canvas, logits_ANV.clone()
        committed_A = torch.zeros_like(columns_AN[:, 0])
        going = list(range(len(rows)))  # places in `rows`
        for place in range(columns_AN.shape[1]):
            some, index = [rows[one] for one in going], to_device(going, columns_AN.device)
            columns = columns_AN[index, place : place + 1]
            logits = context.constrain(logits_ANV[index, place : place + 1], some, columns)
            _, tokens = propose_tokens(logits, canvas, some, columns, context.sampling, context.noise)
            canvas.put(some, columns, tokens)
            logits_ANV[index, place : place + 1] = logits
            committed_A[index] += 1
            if place + 1 == columns_AN.shape[1]:
                break
            right = tokens[:, 0] == drafts_AN[index, place + 1]
            accepted = canvas.read_unfinished(some, block, torch.Tensor.tolist, partial(torch.mul, right))
            going = [one for one, on in zip(going, accepted, strict=True) if on]
            if not going:
                break
        return committed_A, logits_ANV


class SpeculativePredictor(RowCachePredictor):
    """Causal attention, except in drafts, where a row's block attends to all of itself.

    Rows have blocks of their own, which begin at the columns `firsts`, those of their last committed tokens. With the
    cache "block" the keys and values of committed tokens are cached as the check computed them. Those of rejected
    tokens and of drafts stand behind them, where the next block overwrites them before anything attends to them.
    """

    def __init__(
        self, runner: ModelRunner, canvas: Canvas, cache: KVCache, *, shift: bool, adapter: str | None = None
    ) -> None:
        super().__init__(runner, canvas, cache, shift=shift)
        if adapter is not None and not cache.stores:
            raise DlmBridgeError(
                f"draft_adapter {adapter!r} drafts behind keys and values that the model has cached without it: "
                "use cache 'block'"
            )
        self._adapter = DraftAdapter(runner.model, adapter)

    def begin(self, rows: list[int]) -> None:
        """These rows have no new token."""
        for row in rows:
            self.canvas.memory.values("new tokens")[row] = 0

    def firsts(self, rows: list[int]) -> list[int]:
        """The column of each row's last committed token."""
        written = self.canvas.memory.values("new tokens")
        return [self.canvas.starts[row] - 1 + written[row] for row in rows]

    def advance(self, rows: list[int], counts: list[int]) -> list[int]:
        """So many tokens more of each row are committed. Returns the rows with more than none."""
        written = self.canvas.memory.values("new tokens")
        for row, count in zip(rows, counts, strict=True):
            written[row] += count
        return [row for row, count in zip(rows, counts, strict=True) if count]

    def prompt(self, rows: list[int]) -> torch.Tensor:
        """[A, 1, V], the causal model's logits of each row's first new token; with a cache, of its first rows."""
        view = self.prompt_view(rows)
        last_A1 = (self.canvas.first_new(rows) - self.canvas.origin(rows))[:, None] - 1
        with self._adapter.off():
            if not self.cache.stores:
                return self._runner.logits_at(view, last_A1)
            return self._runner.head_at(self._runner.hidden(view, once=True), last_A1)

    def draft(self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor) -> torch.Tensor:
        """[A, N, V], the denoiser's logits of the rows' blocks."""
        with self._adapter.on():
            return self._block_logits(rows, firsts, tokens_AN, draft=True)

    def check(self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor) -> torch.Tensor:
        """[A, N, V], the causal model's logits of what follows each token of the rows' blocks."""
        with self._adapter.off():
            return self._block_logits(rows, firsts, tokens_AN, draft=False)

    def _block_logits(
        self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor, *, draft: bool
    ) -> torch.Tensor:
        own_AN = columns_from(firsts, tokens_AN.shape[1], tokens_AN.device)
        if not self.cache.stores:
            return self._runner.logits_at(self._uncached_view(rows, firsts, tokens_AN, own_AN, draft), own_AN)
        view = self._cached_view(rows, firsts, tokens_AN, draft)
        return self._runner.head(self._runner.hidden(view), slice(None))

    def _uncached_view(
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
        needed_AS = real_AS & (torch.arange(stop, device=own_AN.device) <= own_AN[:, -1:])
        ends = [first + tokens_AN.shape[1] for first in firsts]
        lengths = tuple(end - self.canvas.origins[row] for row, end in zip(rows, ends, strict=True))
        packing = Packing(needed_AS, lengths, causal=True)
        return CanvasView(tokens_AS, mask, positions_AS, 0, stop, packing=packing)

    def _cached_view(self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor, draft: bool) -> CanvasView:
        width, variant, block = tokens_AN.shape[1], self._adapter.variant(draft), None if draft else 1
        before = [first - self.canvas.origins[row] for row, first in zip(rows, firsts, strict=True)]
        stop = max(before) + width
        if min(before) == max(before):  # one range of columns: attention needs no mask
            return CanvasView(tokens_AN, None, None, before[0], stop, block=block, variant=variant)
        stop = min(-(-stop // COLUMN_MULTIPLE) * COLUMN_MULTIPLE, self.canvas.cache_width)
        own_AN = columns_from(before, width, tokens_AN.device)
        attended_AS = torch.arange(stop, device=own_AN.device) <= own_AN[:, -1:]
        return CanvasView(tokens_AN, attended_AS, own_AN, end=stop, columns=own_AN, block=block, variant=variant)


class DraftAdapter:
    """Activates a PEFT adapter for a forward pass; afterwards the model is restored.

    Other adapters are part of the model: what of them is active takes part in drafts and checks alike. Without a name
    nothing is switched. The layers' own attributes are set, since PEFT's methods also change what is trained.
    """

    def __init__(self, model: Any, name: str | None) -> None:
        """Raises DlmBridgeError for an adapter that the model does not have, or that cannot be switched."""
        self._name = name
        self._layers: list[Any] = []
        if name is None:
            return
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        known = sorted({one for layer in layers for kind in layer.adapter_layer_names for one in getattr(layer, kind)})
        if name not in known:
            have = f"it has {', '.join(known)}" if known else "put one on it with peft.PeftModel.from_pretrained"
            raise DlmBridgeError(f"draft_adapter {name!r} is no adapter of the model: {have}")
        if any(layer.merged for layer in layers):
            raise DlmBridgeError(
                f"draft_adapter {name!r} cannot be switched while adapters are merged into the weights: "
                "call unmerge_adapter() first"
            )
        self._layers = layers

    def variant(self, on: bool) -> str:
        """Distinguishes recorded forward passes with and without the adapter."""
        return "" if self._name is None else f"{'with' if on else 'without'} {self._name}"

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._active([self._name] if self._name is not None else []):
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._active([]):
            yield

    @contextmanager
    def _active(self, more: list[str]) -> Iterator[None]:
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self._layers]
        try:
            for layer in self._layers:
                others = [] if layer.disable_adapters else [one for one in layer.active_adapters if one != self._name]
                layer._active_adapter, layer._disable_adapters = others + more, False
            yield
        finally:
            for layer, (active, disabled) in zip(self._layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled


def columns_from(firsts: list[int], width: int, device: torch.device) -> torch.Tensor:
    """[A, width] columns of the canvas, from each row's own first one on."""
    return to_device(firsts, device)[:, None] + torch.arange(width, device=device)
