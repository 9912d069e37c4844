"""DreamOn's sampler (arXiv 2602.01326): a mask becomes a token, two masks, or nothing, so that spans find their
length.

    canvas = prompt + [MASK] * number_of_mask, or a prompt with masks in it;  budget = expand_budget
    until nothing is masked:
        tokens = draw(softmax(logits / temperature), top_p, top_k), never <|expand|> if the row has gen_length tokens
            or no budget
        score = negative entropy (alg "entropy"), probability of the token ("maskgit_plus"), margin ("topk_margin")
        commit the number_transfer_tokens masks with the highest scores
            # alg_temp > 0: draw them from softmax(score / alg_temp) without replacement
        <|delete|> (the end-of-text token): remove the mask; later tokens move to the left
            # pad_delete_to_right ("deletion broadcasting"): also remove all masks to its right
        <|expand|>: replace the mask by two; later tokens move to the right;  budget -= 1

Source: public copies of generation_utils.py of Dream-org/DreamOn-v0-7B, and eval/generator.py, DreamLM/DreamOn
8a0a549. That code truncates the text if a step expands more masks than there is room for; here such masks remain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import SettingError
from dlm_bridge.generation.canvas import BlockLayout, to_device
from dlm_bridge.generation.commit_rules import DenoisingRule, SamplerContext, Step, TopScoresRule, probability
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.kv_cache import KVCache
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.samplers.dream import margin, negative_entropy
from dlm_bridge.generation.token_sampling import TokenSampling

SCORES = {"entropy": negative_entropy, "maskgit_plus": probability, "topk_margin": margin}


@dataclass(frozen=True, kw_only=True)
class DreamOnSampler(Sampler):
    """DreamOn's `diffusion_generate`."""

    name: ClassVar[str] = "dreamon"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("dreamon",)
    takes_commit_rule: ClassVar[bool] = False
    resizes: ClassVar[bool] = True

    gen_length: int = parameter(64, "Maximum number of tokens that replace the masks.")
    number_of_mask: int = parameter(4, "Initial masks after the prompt; a prompt to fill in has its own.", minimum=1)
    alg: str = parameter(
        "entropy", f"Order in which positions are committed: {', '.join(SCORES)}.", choices=tuple(SCORES)
    )
    alg_temp: float | None = parameter(None, "Above 0: draw positions at this temperature.", minimum=0)
    number_transfer_tokens: int = parameter(1, "Positions that a step commits.", minimum=1)
    expand_budget: int | None = parameter(
        None, "Maximum expansions of a row; None: two per token that fits from its first mask on.", minimum=0
    )
    pad_delete_to_right: bool = parameter(False, "A deletion also deletes all masks to its right.")
    expand_token_id: int = parameter(151667, "Token that becomes two masks; by default the config's.", minimum=0)
    delete_token_id: int = parameter(
        151643, "Token that deletes its position; by default the config's `eos_token_id`.", minimum=0
    )

    @classmethod
    def model_parameters(cls, config: Any) -> dict[str, Any]:
        ids = {"expand_token_id": getattr(config, "expand_token_id", None)}
        ids["delete_token_id"] = getattr(config, "eos_token_id", None)
        return {name: token for name, token in ids.items() if isinstance(token, int)}

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            layout=BlockLayout(None, first_masks=self.number_of_mask),
            # Rows of every gen_length follow one rule, so that they share a continuous batch.
            rule=ExpandDeleteRule(replace(self, gen_length=1)),
            sampling=TokenSampling(self.temperature, self.top_k, self.top_p, order=("temperature", "top_p", "top_k")),
            predictor=UncachedPredictor,
        )


class UncachedPredictor(Predictor):
    """Predictor without a KV cache, because tokens move."""

    caches: ClassVar[tuple[type[KVCache], ...]] = (KVCache,)


class ExpandDeleteRule(DenoisingRule):
    """Commits the best masks and applies the deletions and expansions among them, until the row has no masks."""

    edits = True

    def __init__(self, sampler: DreamOnSampler) -> None:
        self._sampler = sampler
        self._best = TopScoresRule(SCORES[sampler.alg], lambda masks: [], sampler.alg_temp)

    def constrained(self, constraints: Constraints) -> DenoisingRule:
        constraints.refuse_text("tokens move while a row is sampled")
        return self

    def begin_block(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        canvas, budget = context.canvas, self._sampler.expand_budget
        self._check_tokens(context.vocabulary_size)
        masked_AN = canvas.masked(context.selected(rows), block)
        firsts_and_masks = torch.stack([block.start + masked_AN.int().argmax(dim=1), masked_AN.sum(dim=1)])
        firsts, masks = context.read(firsts_and_masks)
        budgets = canvas.memory.values("budget")
        for row, first in zip(rows, firsts, strict=True):
            budgets[row] = 2 * (canvas.stops[row] - first) if budget is None else budget
        return [row for row, count in zip(rows, masks, strict=True) if count]

    def denoise_step(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        canvas, budgets = context.canvas, context.canvas.memory.values("budget")
        room = [min(budgets[row], canvas.stops[row] - canvas.ends[row]) for row in rows]
        step = self._propose(context, rows, block, room)
        logits = step.logits
        picked_AN = self._best.select(step)
        deleted_AN, expanded_AN = self._edits(step, picked_AN, room)
        committed_AN = picked_AN & (step.tokens != self._sampler.expand_token_id)
        canvas.put(context.selected(rows), block, torch.where(committed_AN, step.tokens, step.before))
        left_AN = step.masked & ~committed_AN & ~deleted_AN
        counts = torch.stack([left_AN.any(dim=1).long(), deleted_AN.sum(dim=1), expanded_AN.sum(dim=1)])
        more, deleted, expanded = context.read(counts)
        for row, expansions in zip(rows, expanded, strict=True):
            budgets[row] -= expansions
        source_AN = None
        if any(deleted) or any(expanded):
            growth = [plus - minus for plus, minus in zip(expanded, deleted, strict=True)]
            source_AN = canvas.resize(rows, block, 1 - deleted_AN.long() + expanded_AN.long(), growth)
            logits = logits.gather(1, source_AN[..., None].expand_as(logits))
        context.report(rows, block, logits, final=False, moved=source_AN)
        return [row for row, on in zip(rows, more, strict=True) if on]

    def _check_tokens(self, vocabulary: int) -> None:
        ids = {name: getattr(self._sampler, name) for name in ("expand_token_id", "delete_token_id")}
        for name, token in ids.items():
            if token >= vocabulary:
                raise SettingError(name, f"{token} is outside the vocabulary of {vocabulary}")

    def _propose(self, context: SamplerContext, active: list[int], block: slice, room: list[int]) -> Step:
        """Proposals of the step, without <|expand|> in rows without room."""
        logits = context.predict(active, block)
        full_A = to_device(room, logits.device) == 0
        if not all(room):
            logits = logits.clone()
            logits[..., self._sampler.expand_token_id].masked_fill_(full_A[:, None], -torch.inf)
        transfers = [self._sampler.number_transfer_tokens] * len(active)
        return context.propose(active, block, logits, transfers)

    def _edits(self, step: Step, picked_AN: torch.Tensor, room: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """[A, N] twice: True at deleted positions, and at those that become two masks."""
        deleted_AN = picked_AN & (step.tokens == self._sampler.delete_token_id)
        if self._sampler.pad_delete_to_right:
            deleted_AN = step.masked & (deleted_AN.cumsum(dim=1) > 0)
        expanded_AN = picked_AN & (step.tokens == self._sampler.expand_token_id) & ~deleted_AN
        room_A1 = to_device(room, picked_AN.device)[:, None]
        return deleted_AN, expanded_AN & (expanded_AN.cumsum(dim=1) <= room_A1)
