"""Llama, Mistral, Qwen2 and Qwen3: transformers' names, without experts."""

from __future__ import annotations

from typing import Any

from dlm_bridge.convert.mapping import Carried, Dims, Mapping
from dlm_bridge.models.autoregressive.common import ACTIVATION, settings
from dlm_bridge.models.standard import TIED_HEAD, require, standard_dims, standard_rules

# The first Llama checkpoints store the rotary frequencies, which follow from the config.
FREQUENCIES = Carried("model.layers.{layer}.self_attn.rotary_emb.inv_freq", in_model=False)


def _dense(defaults: dict[str, Any], *facts: str) -> Mapping:
    def dims(config: dict[str, Any]) -> Dims:
        require(config, ACTIVATION)
        return standard_dims({**defaults, **config}, frozenset(facts))

    def transformer(config: dict[str, Any]) -> dict[str, Any]:
        return settings({**defaults, **config}, dims(config))

    return Mapping(rules=standard_rules(), dims=dims, transformer=transformer, carried=(*TIED_HEAD, FREQUENCIES))


# Where config.json leaves a key out, transformers' configuration classes say this.
LLAMA = _dense({"rms_norm_eps": 1e-6})
MISTRAL = _dense({"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096})
QWEN2 = _dense({"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "use_sliding_window": False}, "qkv_bias")
QWEN3 = _dense(
    {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False}, "qk_norm"
)
