"""Nemotron-Labs-Diffusion's tensors, Hub to Megatron: Llama's names under `encoder.`, and `diffusion_head`."""

from __future__ import annotations

from typing import Any

from dlm_bridge.convert.mapping import Carried, Dims, Mapping
from dlm_bridge.models.standard import require, standard_dims, standard_rules, standard_transformer

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
REQUIRED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None}


def dims(config: dict[str, Any]) -> Dims:
    require(config, REQUIRED)
    return standard_dims({**DEFAULTS, **config})


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """What megatron-core needs beyond the sizes, and what `parallel.query_scaling` does."""
    settings = standard_transformer({**DEFAULTS, **config})
    rope = config.get("rope_parameters") or {}
    if beta := rope.get("llama_4_scaling_beta"):
        length = int(rope["original_max_position_embeddings"])
        settings |= {"query_scaling_beta": float(beta), "query_scaling_length": length}
    return settings


MAPPING = Mapping(
    rules=standard_rules(root="encoder.", head="diffusion_head.weight"),
    dims=dims,
    transformer=transformer,
    carried=(Carried("diffusion_head.weight", when="tied", copy_of="encoder.embed_tokens.weight"),),
)
