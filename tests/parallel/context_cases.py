"""What the proof of context parallelism is about: tiny models, every objective, plain, padded and packed rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from dlm_bridge.models.families import FamilySpec, find_family
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.single_stream import MaskedDiffusion, NextTokenPrediction, ShiftedDiffusion
from dlm_bridge.objectives.two_streams import (
    BlockDiffusion,
    ComplementaryBlockDiffusion,
    NemotronDiffusion,
    WeDLMDiffusion,
)
from tests.interop.autoregressive import CONFIGS, tensors_of
from tests.interop.cases import Model, models

LENGTH, BLOCK, MASK = 24, 4, 99


def _short_window() -> Model:
    return Model({**CONFIGS["mistral_window"], "sliding_window": 7}, tensors_of)


@cache
def context_models() -> dict[str, Model]:
    names = ("gqa", "sdar", "qwen2", "qwen3_yarn", "wedlm", "dream", "fast_dllm_v2")
    experts = ("llada_moe", "llada2_moe", "sdar_moe", "mixtral")
    return {name: models()[name] for name in (*names, *experts)} | {"window": _short_window()}


def plain(objective: Objective) -> NoisyBatch:
    return objective.noise(_tokens(), _uniforms())


def padded(objective: Objective) -> NoisyBatch:
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [17]])
    return objective.noise(_tokens(), _uniforms(), attention_mask=real)


def packed(objective: Objective) -> NoisyBatch:
    documents = torch.tensor([[0] * 5 + [1] * 11 + [2] * 8, [0] * 16 + [1] * 8])
    return objective.noise(_tokens(), _uniforms(), documents=documents)


def annealed(objective: Objective) -> NoisyBatch:
    """Causal and half of the later keys, drawn for each row."""
    generator = torch.Generator().manual_seed(3)
    open_BLL = torch.rand(2, LENGTH, LENGTH, generator=generator) < 0.5
    causal_LL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return dataclasses.replace(plain(objective), pairs=(open_BLL | causal_LL)[:, None])


@dataclass(frozen=True)
class Case:
    """One model under one objective."""

    model: str
    objective: Objective
    rows: Callable[[Objective], NoisyBatch] = plain

    @property
    def name(self) -> str:
        return f"{self.model}-{type(self.objective).__name__}-{self.rows.__name__}"

    @property
    def family(self) -> FamilySpec:
        model = context_models()[self.model]
        return find_family(model.config, model.family)

    @property
    def recomputations(self) -> tuple[str, ...]:
        """With packed rows, and once with everything else as simple as can be."""
        if self.model == "gqa" and self.rows is plain:
            return ("full", "selective")
        return ("full",) if self.rows is packed else ()

    @property
    def has_codes(self) -> bool:
        """Whether its batches hold the attention mask, not the layers."""
        return (
            self.rows is not plain
            or self.noisy().mask_descriptor is not None
            or self.family.attention_pattern == "block_causal"
        )

    def noisy(self) -> NoisyBatch:
        return self.rows(self.objective)


def cases() -> list[Case]:
    masked, following = MaskedDiffusion(MASK), NextTokenPrediction()
    block, half = BlockDiffusion(MASK, block_size=BLOCK), ComplementaryBlockDiffusion(MASK, block_size=BLOCK)
    hybrid, permuted = NemotronDiffusion(MASK, block_size=BLOCK), WeDLMDiffusion(MASK, block_size=BLOCK)
    return [
        *(Case("gqa", masked, rows) for rows in (plain, padded, packed, annealed)),
        *(Case("qwen2", following, rows) for rows in (plain, padded, packed)),
        *(Case("sdar", block, rows) for rows in (plain, padded, packed)),
        *(Case("gqa", hybrid, rows) for rows in (plain, packed)),
        *(Case("wedlm", permuted, rows) for rows in (plain, padded, packed)),
        Case("sdar", masked),  # block-causal, one stream
        Case("dream", ShiftedDiffusion(MASK), packed),
        Case("fast_dllm_v2", half, packed),
        Case("qwen3_yarn", following, packed),
        Case("window", following),
        *(Case("llada_moe", masked, rows) for rows in (plain, packed)),
        Case("llada2_moe", block, packed),
        Case("sdar_moe", block, packed),
        Case("mixtral", following),
    ]


def hub(root: Path, model: str) -> Path:
    return root / "hub" / model


def _tokens() -> torch.Tensor:
    return torch.randint(0, 98, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def _uniforms() -> Uniforms:
    return Uniforms.keyed(7, 1, range(2), LENGTH)
