"""LLaDA2.2's router in the Megatron engine: the blocks that a mask descriptor tells apart, and what is refused.
Loss and gradients over layouts are compared in test_live_model.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge import Layout
from dlm_bridge.attention.masks import MaskDescriptor, document_ids
from dlm_bridge.errors import DlmBridgeError, LayoutError, SettingError
from dlm_bridge.models.modeling_llada2_moe import routing_blocks
from tests.families import llada2_moe
from tests.refusals import refused

pytest.importorskip("megatron.core")
CASE = next(case for case in llada2_moe.CASES if case.config.get("expert_capacity"))
BLOCK = 4


def rows(lengths: list[int], left: int = 0, right: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents and positions [1, S] of a row of documents with padding, to which positions are as transformers'."""
    real = torch.tensor([[False] * left + [True] * sum(lengths) + [False] * right])
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate([left, *lengths, right])])[None]
    positions = torch.cat([torch.zeros(left), *(torch.arange(n) for n in lengths), torch.zeros(right)])[None].long()
    return document_ids(real, documents), positions


@pytest.mark.parametrize("packed", [rows([11]), rows([6, 4, 1, 1, 9]), rows([7], left=3), rows([5, 8], right=4)])
def test_a_mask_tells_the_blocks_that_the_hub_model_counts(packed: tuple[torch.Tensor, torch.Tensor]) -> None:
    from dlm_bridge.parallel.mcore_patches.modules import routing_runs

    documents, positions = packed
    one = MaskDescriptor.block_causal(documents, positions, BLOCK)
    two = MaskDescriptor.two_streams(documents, positions, BLOCK)
    for descriptor, counted in ((one, positions), (two, torch.cat([positions, positions], dim=1))):
        both = routing_runs(descriptor.codes.expand(2, -1, -1))
        assert torch.equal(both.flatten(), routing_blocks(counted.expand(2, -1), BLOCK))


@pytest.mark.parametrize(
    ("cp", "overrides", "kind", "field"),
    [
        (2, {}, LayoutError, "cp"),
        (1, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}, SettingError, "recompute_modules"),
        (1, {"moe_router_load_balancing_type": "aux_loss"}, SettingError, "moe_aux_loss_coeff"),
        (1, {"moe_expert_capacity_factor": 1.0}, SettingError, "moe_aux_loss_coeff"),
    ],
)
def test_what_a_router_of_blocks_cannot_do(
    cp: int, overrides: dict[str, Any], kind: type[DlmBridgeError], field: str
) -> None:
    from dlm_bridge.mapping.layout import ContextParallelConfig
    from dlm_bridge.parallel.config import model_config

    mapping, config = CASE.spec.mapping, CASE.config
    parallel = ContextParallelConfig(cp=cp)
    dims = mapping.dims(config)
    with refused(kind, field):
        model_config(mapping, config, dims, Layout(), torch.float32, parallel, **overrides)
