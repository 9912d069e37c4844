"""WeDLM's tensors, Hub to Megatron: Qwen2's or Qwen3's by `attention_bias` and `qk_norm`."""

from __future__ import annotations

from typing import Any

from dlm_bridge.convert.mapping import Dims, Mapping
from dlm_bridge.models.standard import (
    PLAIN,
    TIED_HEAD,
    require,
    standard_dims,
    standard_rules,
    standard_transformer,
)

DEFAULTS = {"max_position_embeddings": 32768}


def _facts(config: dict[str, Any]) -> frozenset[str]:
    named = {"qkv_bias": config.get("attention_bias", True), "qk_norm": config.get("qk_norm", False)}
    return frozenset(fact for fact, holds in named.items() if holds)


def dims(config: dict[str, Any]) -> Dims:
    require(config, {key: value for key, value in PLAIN.items() if key != "attention_bias"})
    return standard_dims(config, _facts(config))


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    return standard_transformer({**DEFAULTS, **config}, _facts(config))


MAPPING = Mapping(rules=standard_rules(), dims=dims, transformer=transformer, carried=TIED_HEAD)
