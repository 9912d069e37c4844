"""Tensor parallel sampling: splits that would cut a head or an expert are refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config, Qwen3Config, Qwen3MoeConfig

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.token_sampling import shared_seed
from dlm_bridge.loading import check_tensor_parallel_split
from dlm_bridge.models.modeling_llada2_moe import LLaDA2MoeConfig

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("config", "processes", "said"),
    [
        (Qwen3Config(**HEADS), 8, "4 key/value heads cannot be shared by 8 processes: start 2, 4 of them"),
        (Qwen3Config(**HEADS), 3, "32 attention heads cannot be shared by 3 processes: start 2, 4 of them"),
        (Qwen3Config(num_attention_heads=7, num_key_value_heads=1), 2, "by 2 processes: use --device-map auto"),
        (Qwen3MoeConfig(**HEADS, moe_intermediate_size=90), 4, "90 columns of an expert .* 4 processes: start 2 of"),
        (LLaDA2MoeConfig(), 3, "512 columns of an expert cannot be shared by 3 processes: start 2, 4, 8, 16, 32, 64"),
        (GPT2Config(), 2, "no tensor parallelism for GPT2Config: use --device-map auto"),
    ],
)
def test_what_cannot_be_cut_is_named(config: Any, processes: int, said: str) -> None:
    with pytest.raises(DlmBridgeError, match=f"^my/model: .*{said}"):
        check_tensor_parallel_split(config, processes, "my/model")


def test_what_can_be_cut() -> None:
    check_tensor_parallel_split(Qwen3Config(**HEADS), 4, "")
    check_tensor_parallel_split(Qwen3MoeConfig(**HEADS, moe_intermediate_size=768), 2, "")
    check_tensor_parallel_split(
        LLaDA2MoeConfig(), 8, ""
    )  # of 4 key/value heads: they are in one matrix, which all processes gather


def test_a_whole_model_has_no_seed_to_share(model: Any) -> None:
    assert shared_seed(model) is None
