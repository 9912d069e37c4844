"""Nemotron-Labs-Diffusion's linear self-speculation: speculative decoding by one model.

    text = prompt + causal model's next token
    while new tokens are missing:
        draft = [last token] + [MASK] * (block_length - 1)
        fill the masks of draft with the denoiser, whose block attends to all of itself and to the text
            # threshold 0: in one forward pass; above: each pass fills the masks with probability >= threshold, and the
            # best one
        check = causal model's next token after each token of draft
        commit the tokens of check that draft predicted, and the first one that it did not

At temperature 0, the text is the causal model's, token for token; above 0, it is drawn from that model.

Source: the model's `linear_spec_generate`, in its modeling code on the Hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import SettingError
from dlm_bridge.generation.canvas import BlockLayout, Canvas, to_device
from dlm_bridge.generation.commit_rules import MINUS_INFINITY, DenoisingRule, SamplerContext, best
from dlm_bridge.generation.kv_cache import KVCache
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.runtime.runner import CanvasView, ModelRunner
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.samplers.idlm import SpeculativePredictor, columns_from
from dlm_bridge.generation.token_sampling import probability_of, propose_tokens


@dataclass(frozen=True, kw_only=True)
class LinearSpecSampler(Sampler):
    """The model's `linear_spec_generate`."""

    name: ClassVar[str] = "linear_spec"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("nemotron_labs_diffusion", "nemotron")
    infills: ClassVar[bool] = False  # causal attention does not reach later tokens
    model_blocks: ClassVar[bool] = True
    takes_commit_rule: ClassVar[bool] = False

    block_length: int = parameter(32, "Tokens of a draft, including the last committed one.")
    threshold: float = parameter(
        0.0, "0: one forward pass fills the draft. Above: each pass fills the tokens with at least this probability."
    )
    draft_adapter: str | None = parameter(
        None, "Name of a PEFT adapter that is active in drafts only, such as the published linear_spec_lora."
    )

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        spare = self.block_length - 1  # columns that a check may predict after the last new token
        return SamplerSpec(
            layout=BlockLayout(None, spare=spare),
            rule=SpeculativeRule(self.block_length, self.threshold),
            sampling=self.sampling(),
            predictor=DraftPredictor,
            predictor_options={"adapter": self.draft_adapter},
        )


@dataclass(frozen=True)
class SpeculativeRule(DenoisingRule):
    """Rule whose steps are a draft and its check; see `LinearSpecSampler` for the arguments."""

    needs_prompt: ClassVar[bool] = True
    keeps_text: ClassVar[bool] = True

    block_length: int
    threshold: float = 0.0

    def begin_block(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Commit the causal model's first token. The block contains all new tokens."""
        canvas, predictor = context.canvas, context.predictor
        assert isinstance(predictor, DraftPredictor)
        predictor.begin(rows)
        firsts = predictor.firsts(rows)
        last_A1 = canvas.take(rows, columns_from(firsts, 1, canvas.tokens.device))
        return self._go_on(context, block, rows, firsts, last_A1, predictor.prompt(rows))

    def denoise_step(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Write a draft and check it."""
        predictor = context.predictor
        assert isinstance(predictor, DraftPredictor)
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
        """Commit the tokens that pass the check. Returns the rows that have not ended."""
        predictor = context.predictor
        assert isinstance(predictor, DraftPredictor)
        committed_A = self._commit(context, block, rows, firsts, drafts_AN, logits_ANV)
        values = partial(torch.mul, committed_A)
        counts = context.canvas.read_unfinished(context.selected(rows), block, context.read, values)
        return predictor.advance(rows, counts)

    def _draft(
        self, context: SamplerContext, predictor: DraftPredictor, rows: list[int], firsts: list[int]
    ) -> torch.Tensor:
        """[A, N] tokens: the last committed one of each row, and the draft after it."""
        canvas = context.canvas
        columns_AN = columns_from(firsts, self.block_length, canvas.tokens.device)
        drafts_AN = canvas.take(rows, columns_AN)
        going = list(range(len(rows))) if self.block_length > 1 else []  # places in `rows`
        by_text = context.constraints is not None and context.constraints.by_text
        while going:
            some = [rows[place] for place in going]
            # A slice copies nothing.
            which = slice(None) if some == rows else to_device(going, columns_AN.device)
            columns = columns_AN[which, 1:]
            logits = predictor.draft(rows, firsts, drafts_AN)[which, 1:]
            # Constraints by text apply in the check only: a draft has no committed text before its tokens.
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
        """Commit the check's tokens that the drafts predicted, and one more.

        Returns [A], the number of tokens; for rows that end before, possibly including tokens after the end.
        """
        canvas = context.canvas
        columns_AN = columns_from(firsts, drafts_AN.shape[1], drafts_AN.device) + 1
        if context.constraints is not None and context.constraints.by_text:
            unconstrained_ANV = logits_ANV
            committed_A, logits_ANV = self._commit_one_by_one(context, block, rows, columns_AN, drafts_AN, logits_ANV)
            context.keep_unconstrained(unconstrained_ANV)
        else:
            logits_ANV = context.constrain(logits_ANV, rows, columns_AN)
            allowed_ANV = context.follow(rows, firsts, drafts_AN[:, 1:], logits_ANV)
            _, tokens_AN = propose_tokens(allowed_ANV, canvas, rows, columns_AN, context.sampling, context.noise)
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
        """`_commit` for constraints by text, which depend on committed tokens. Also returns the constrained logits."""
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


class DraftPredictor(SpeculativePredictor):
    """Predictor of drafts and of their checks. An adapter may be active in drafts only."""

    def __init__(
        self, runner: ModelRunner, canvas: Canvas, cache: KVCache, *, shift: bool, adapter: str | None = None
    ) -> None:
        super().__init__(runner, canvas, cache, shift=shift)
        if adapter is not None and not cache.stores:
            raise SettingError("draft_adapter", "reads a KV cache that is written without the adapter: `cache=block`")
        self._adapter = DraftAdapter(runner.model, adapter)

    def prompt(self, rows: list[int]) -> torch.Tensor:
        with self._adapter.off():
            return super().prompt(rows)

    def draft(self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor) -> torch.Tensor:
        """[A, N, V], the denoiser's logits for the rows' blocks."""
        with self._adapter.on():
            return self._block_logits(rows, firsts, tokens_AN, draft=True)

    def check(self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor) -> torch.Tensor:
        with self._adapter.off():
            return super().check(rows, firsts, tokens_AN)

    def _cached_view(
        self, rows: list[int], firsts: list[int], tokens_AN: torch.Tensor, own_AN: torch.Tensor, draft: bool
    ) -> CanvasView:
        view = super()._cached_view(rows, firsts, tokens_AN, own_AN, draft)
        return replace(view, variant=self._adapter.variant(draft))


class DraftAdapter:
    """Activates a PEFT adapter for a forward pass, and restores the model afterwards.

    Other active adapters are part of the model, in drafts and in checks. Without a name, nothing is switched. The
    layers' attributes are set directly, because PEFT's methods also change `requires_grad`.

    Raises:
        SettingError: the model does not have the adapter, or it cannot be switched.
    """

    def __init__(self, model: Any, name: str | None) -> None:
        self._name = name
        self._layers: list[Any] = []
        if name is None:
            return
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        known = sorted({one for layer in layers for kind in layer.adapter_layer_names for one in getattr(layer, kind)})
        if name not in known:
            have = f"it has {', '.join(known)}" if known else "add one with peft.PeftModel.from_pretrained"
            raise SettingError("draft_adapter", f"the model has no adapter {name!r}: {have}")
        if any(layer.merged for layer in layers):
            raise SettingError(
                "draft_adapter", f"{name!r} is merged into the weights: call unmerge_adapter() before sampling"
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
