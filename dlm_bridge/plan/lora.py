"""Parameters of a LoRA adapter on one rank, from the sizes of the layers that it changes."""

from __future__ import annotations

from dlm_bridge.errors import SettingError
from dlm_bridge.plan.model import PlannedModel

EXPERTS = "experts"
# Input and output size of each target, in words of `Dims`; "r" marks row-parallel layers, whose input TP splits.
_ATTENTION = {
    "q_proj": ("hidden", "q_rows", ""),
    "k_proj": ("hidden", "kv_rows", ""),
    "v_proj": ("hidden", "kv_rows", ""),
    "query_key_value": ("hidden", "q_rows kv_rows kv_rows", ""),
    "qkv_proj": ("hidden", "q_rows kv_rows kv_rows", ""),
    "o_proj": ("q_rows", "hidden", "r"),
}
_LATENT = {
    "q_proj": ("hidden", "q_rows", ""),
    "q_a_proj": ("hidden", "q_lora", ""),
    "q_b_proj": ("q_lora", "q_rows", ""),
    "kv_a_proj_with_mqa": ("hidden", "kv_down", ""),
    "kv_b_proj": ("kv_lora", "kv_up", ""),
    "o_proj": ("values", "hidden", "r"),
}
_MLP = {
    "gate_proj": ("hidden", "ffn", ""),
    "up_proj": ("hidden", "ffn", ""),
    "gate_up_proj": ("hidden", "ffn ffn", ""),
    "down_proj": ("ffn", "hidden", "r"),
}


def adapter_layer(
    model: PlannedModel, moe: bool, tp: int, ep: int, etp: int, rank: int, targets: tuple[str, ...]
) -> tuple[int, int]:
    """Trained parameters of one layer on one rank: of the dense part, and of the routed experts.

    Raises SettingError for a target that the model's layers do not have.
    """
    attention = dict(_LATENT if model.latent_attention else _ATTENTION)
    if model.latent_attention:
        for name in ("q_proj",) if "q_lora" in model.dims.facts else ("q_a_proj", "q_b_proj"):
            del attention[name]
    dense = experts = 0
    for target in targets or tuple(name for name in model.family.lora_targets if name in attention | _MLP):
        if target == EXPERTS and model.dims.experts:
            if moe:  # one pair of factors per stack: gate and up, and down
                hidden, width = model.dims.hidden, model.dims.moe_ffn
                experts += model.dims.experts // ep * rank * (2 * hidden + 3 * width) // etp
        elif target in attention:
            dense += _factors(model, attention[target], tp, rank, model.dims.ffn)
        elif target in _MLP:
            width = model.dims.shared_ffn if moe else model.dims.ffn
            dense += _factors(model, _MLP[target], tp, rank, width) if width else 0
        else:
            known = [*attention, *_MLP, *([EXPERTS] if model.dims.experts else [])]
            raise SettingError("lora_targets", f"{target}: choose from {', '.join(known)}")
    return dense, experts


def _factors(model: PlannedModel, sizes: tuple[str, str, str], tp: int, rank: int, ffn: int) -> int:
    """Elements of A [rank, in] and B [out, rank], of which tensor parallelism splits one."""
    into, out = (sum(ffn if word == "ffn" else model.size(word) for word in words.split()) for words in sizes[:2])
    return rank * (into // tp + out if sizes[2] else into + out // tp)
