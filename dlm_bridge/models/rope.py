"""RoPE scaling and sliding windows of published configs, as megatron-core's settings."""

from __future__ import annotations

import math
from typing import Any

from dlm_bridge.errors import CheckpointError

# Constants of megatron-core's llama3 scaling, equal to those of all published Llama 3.1 to 3.3.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_parameters(config: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the parameters of the type, from a config of transformers 4 (`rope_theta`,
    `rope_scaling`) or 5 (`rope_parameters`). `theta`: the family's default."""
    scaling = dict(config.get("rope_scaling") or {})
    parameters = {**scaling, **(config.get("rope_parameters") or {})}
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    parameters.setdefault("rope_theta", config.get("rope_theta") or theta)
    if config.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return parameters


def rope_theta_form(config: dict[str, Any]) -> dict[str, Any]:
    """A config with its rotary settings under transformers 4's keys (`rope_theta`, `rope_scaling`,
    `partial_rotary_factor`), which published remote code, vLLM and SGLang read; they use defaults for missing keys.

    Unchanged without `rope_parameters`, or with one per type of layer.
    """
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        return config
    rope = dict(parameters)
    named = {key: value for key, value in config.items() if key != "rope_parameters"}
    named["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        named["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope.get("rope_type", "default") != "default":
        named["rope_scaling"] = rope
    return named


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's arguments for the published RoPE; those of YaRN are attributes that its GPTModel reads.

    Raises CheckpointError for a scaling that megatron-core cannot compute.
    """
    rope = rope_parameters(config)
    settings: dict[str, Any] = {"rotary_base": float(rope["rope_theta"])}
    partial = float(rope.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        settings["rotary_percent"] = partial
    kind = rope["rope_type"]
    if kind == "default":
        return settings
    if kind == "llama3":
        for key, value in _LLAMA3.items():
            if rope.get(key) != value:
                raise CheckpointError(
                    "config.json",
                    f"RoPE scaling 'llama3' with {key} {rope.get(key)}: megatron-core supports only {value}",
                )
        return settings | {"rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    if kind == "linear":
        return settings | {"seq_len_interpolation_factor": float(rope["factor"])}
    if kind == "yarn" and partial == 1.0:
        return settings | {"position_embedding_type": "yarn"} | _yarn(config, rope)
    what = "YaRN on a part of each head" if kind == "yarn" else f"RoPE scaling '{kind}'"
    raise CheckpointError("config.json", f"megatron-core does not support {what}")


def yarn_numbers(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """YaRN's factor, original length, betas and the two mscales, as in transformers."""
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = rope.get("factor") or config["max_position_embeddings"] / original
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if not (mscale and all_dim):
        mscale = all_dim = None
    wanted = rope.get("attention_factor")
    if wanted is not None and factor > 1:  # solved for mscale in 0.1 * mscale * log(factor) + 1
        mscale, all_dim = (float(wanted) - 1) / (0.1 * math.log(factor)), 0.0
    return {
        "rotary_scaling_factor": float(factor),
        "original_max_position_embeddings": int(original),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }


def _yarn(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    numbers = {f"yarn_{name}": value for name, value in yarn_numbers(config, rope).items()}
    return numbers | {"yarn_correction_range_round_to_int": bool(rope.get("truncate", True))}


def window_settings(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's sliding window: a position attends to `sliding_window` positions, including itself.

    The layers with a window are those of `layer_types`, else those from `max_window_layers` on, else all.
    """
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return {}
    layers = int(config["num_hidden_layers"])
    if config.get("layer_types"):
        slides = [int(kind == "sliding_attention") for kind in config["layer_types"]]
    else:
        first = config.get("max_window_layers") or 0
        slides = [int(layer >= first) for layer in range(layers)]
    if not any(slides):
        return {}
    settings: dict[str, Any] = {"window_size": (int(window) - 1, 0)}
    return settings if all(slides) else settings | {"window_attn_skip_freq": slides}
