"""Parameter names within one rank: those of the legacy format and of Megatron FSDP, for either layer spec.

Transformer Engine's spec keeps a norm in the linear layer that follows it (`linear_qkv.layer_norm_weight`), the local
spec has a module for it (`input_layernorm.weight`). Experts are grouped (`experts.linear_fc1.weight3`) or sequential
(`experts.local_experts.3.linear_fc1.weight`).
"""

from __future__ import annotations

import re

KEY_STYLES = ("te", "te-sequential", "local")

LAYER_OF = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"experts\.experts\.\{expert\}\.(linear_fc[12])\.(weight|bias)$")
# Fused norm -> the local spec's module, both below the layer.
_LOCAL_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
_LINEAR = {
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer", "eh_proj",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
}  # fmt: skip
_TE_NORMS = {"q_layernorm", "k_layernorm", "pre_mlp_layernorm", "final_layernorm", "input_layernorm", "enorm", "hnorm"}


def rank_names(template: str, layer: int | None, expert: int | None, mtp: int | None = None) -> tuple[str, ...]:
    """Every name that a rank may have for a mapping's Megatron tensor, with the layer and expert numbers given."""
    return tuple(dict.fromkeys(rank_name(template, layer, expert, style, mtp) for style in KEY_STYLES))


def rank_name(template: str, layer: int | None, expert: int | None, style: str, mtp: int | None = None) -> str:
    """The name in one style. `template` is `Rule.megatron`; `layer` and `expert` count within the rank."""
    if _EXPERT.search(template):
        grouped = r"experts.\1.\2{expert}" if style == "te" else r"experts.local_experts.{expert}.\1.\2"
        template = _EXPERT.sub(grouped, template)
    if style == "local":
        for fused, module in _LOCAL_NORMS.items():
            template = template.replace(fused, module)
    return template.format(layer=layer, expert=expert, mtp=mtp)


def extra_state_of(name: str, style: str) -> str | None:
    """The module's `_extra_state` that goes with a weight's name, None where the module has none. A None under it is
    what a module without FP8 history saves."""
    module, _, last = name.rpartition(".")
    if not last.startswith("weight"):
        return None
    kind = module.rpartition(".")[2]
    return f"{module}._extra_state" if kind in _LINEAR or (style != "local" and kind in _TE_NORMS) else None
