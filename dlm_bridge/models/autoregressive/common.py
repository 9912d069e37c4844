"""What the autoregressive families share: megatron-core's settings beyond the sizes."""

from __future__ import annotations

from typing import Any

from dlm_bridge.convert.mapping import Dims
from dlm_bridge.models.moe import check_experts
from dlm_bridge.models.rope import window_settings
from dlm_bridge.models.standard import standard_transformer

ACTIVATION: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def routed_experts(config: dict[str, Any]) -> int:
    """How many experts the router chooses of, by whichever name the family and the transformers version gave it.

    Raises DlmBridgeError unless every token can be given `num_experts_per_tok` of them.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = next((config[name] for name in names if config.get(name) is not None), None)
    check_experts({**config, "num_experts": found})
    assert isinstance(found, int)
    return found


def settings(config: dict[str, Any], dims: Dims, theta: float = 10000.0) -> dict[str, Any]:
    """For a pre-norm RMSNorm SwiGLU decoder with the config's RoPE and window. `config` must hold the family's
    defaults. Raises DlmBridgeError where megatron-core cannot compute the model."""
    config = {"rope_theta": theta, **config}
    return standard_transformer(config, dims.facts) | window_settings(config)
