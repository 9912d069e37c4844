"""Multi-token prediction layers: on the Hub they follow the model's layers, in Megatron they are `mtp.layers.*`.

Each is one more transformer layer that is fed the joined norms of the next token's embedding and of the hidden state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dlm_bridge.convert.mapping import Carried, Direct, Rule
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.standard import LAYER

MTP = "mtp.layers.{mtp}."


def mtp_rules(layer: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """`rules` are those of one of the model's layers, of which an MTP layer has its own; `layer` is the Hub prefix."""
    return (
        Direct(MTP + "enorm.weight", name=layer + "enorm.weight", shape="hidden"),
        Direct(MTP + "hnorm.weight", name=layer + "hnorm.weight", shape="hidden"),
        Direct(MTP + "eh_proj.weight", name=layer + "eh_proj.weight", shape="hidden mtp_input", axis=0),
        *(replace(rule, megatron=rule.megatron.replace(LAYER, MTP + "transformer_layer.")) for rule in rules),
        Direct(MTP + "final_layernorm.weight", name=layer + "shared_head.norm.weight", shape="hidden"),
    )


def mtp_carried(layer: str) -> tuple[Carried, ...]:
    """The Hub's own copies of embedding and head in each MTP layer, which Megatron shares with the model."""
    names = (layer + "embed_tokens.weight", layer + "shared_head.head.weight")
    return tuple(Carried(name, in_model=False, mtp=True) for name in names)


def mtp_layers(config: dict[str, Any]) -> int:
    """How many there are. Raises DlmBridgeError for what is no number."""
    found = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)) or 0
    if type(found) is not int or found < 0:
        raise DlmBridgeError(f"config.json: num_nextn_predict_layers {found!r} is not a number of layers")
    return found
