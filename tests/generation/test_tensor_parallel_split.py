"""Tensor parallel sampling: splits that would cut a head or an expert are refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config, Qwen3Config, Qwen3MoeConfig

from dlm_bridge.errors import LayoutError
from dlm_bridge.generation.token_sampling import shared_seed
from dlm_bridge.loading.placement import Placement, check_tensor_parallel_split
from dlm_bridge.models.modeling_llada2_moe import LLaDA2MoeConfig
from dlm_bridge.replicas import Replicas
from tests.refusals import refused

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("config", "processes", "named"),
    [
        (Qwen3Config(**HEADS), 8, "4 key/value heads"),
        (Qwen3Config(**HEADS), 3, "2, 4, or"),
        (Qwen3Config(num_attention_heads=7, num_key_value_heads=1), 2, "device_map=auto"),
        (Qwen3MoeConfig(**HEADS, moe_intermediate_size=90), 4, "90 columns"),
        (LLaDA2MoeConfig(), 3, "2, 4, 8, 16, 32, 64"),
        (GPT2Config(), 2, "GPT2Config"),
    ],
)
def test_what_cannot_be_cut_is_named(config: Any, processes: int, named: str) -> None:
    with refused(LayoutError, "tp", named):
        check_tensor_parallel_split(config, processes)


def test_what_can_be_cut() -> None:
    check_tensor_parallel_split(Qwen3Config(**HEADS), 4)
    check_tensor_parallel_split(Qwen3MoeConfig(**HEADS, moe_intermediate_size=768), 2)
    check_tensor_parallel_split(
        LLaDA2MoeConfig(), 8
    )  # of 4 key/value heads: they are in one matrix, which all processes gather


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_groups_of_neighbouring_processes_share_the_rows(tp: int) -> None:
    """Each row is in one group, in all of whose processes it has the same order."""
    shares = [list(Replicas(rank, 6, tp).share(range(10))) for rank in range(6)]
    groups = [shares[first : first + tp] for first in range(0, 6, tp)]
    assert all(share == group[0] for group in groups for share in group)
    assert sorted(row for group in groups for row in group[0]) == list(range(10))
    assert [Replicas(rank, 6, tp).leads for rank in range(6)] == [True, *[False] * 5]


def test_a_mesh_of_copies_is_tensor_parallel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own reading of the configuration there is no FSDP in it."""
    monkeypatch.setenv("WORLD_SIZE", "6")
    config = Placement(tp=2, replicated=True).arguments()["distributed_config"]
    sizes = (config.pp_size, config.dp_replicate_size, config.fsdp_size, config.tp_size, config.dp_size)
    assert sizes == (1, 3, 1, 2, 1)
    assert Placement(tp=1, replicated=True, device="cpu").arguments() == {}
    with refused(LayoutError, "tp", "4", "6"):
        Placement(tp=4, replicated=True).arguments()


def test_a_whole_model_has_no_seed_to_share(model: Any) -> None:
    assert shared_seed(model) is None
