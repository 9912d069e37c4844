"""RND1, Qwen3-MoE with bidirectional attention and shifted logits: spec, mapping.

Source: the public configuration_rnd.py, modeling_rnd.py and sampling.py of RadicalNumerics/RND1.
"""

from __future__ import annotations

from dlm_bridge.models.decoder_mapping import ATTENTION_TARGETS, QWEN3_30B_A3B, qwen3_moe_mapping
from dlm_bridge.models.families import FamilySpec

MAPPING = qwen3_moe_mapping({**QWEN3_30B_A3B, "max_position_embeddings": 40960})


SPEC = FamilySpec(
    name="rnd1",
    title="RND1",
    hub_ids=("radicalnumerics/RND1-Base-0910",),
    architectures=("RND1LM", "RND1"),
    model_type="rnd1",
    config_class="dlm_bridge.models.modeling_rnd1:RND1Config",
    model_class="dlm_bridge.models.modeling_rnd1:RND1LM",
    mapping=MAPPING,
    auto_classes=("AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM"),
    shift=True,
    mask_token_id=151669,
    objective="shifted",
    sampler={"algorithm": "rnd1"},
    lora_targets=ATTENTION_TARGETS,
    checked_against="the public modeling_rnd.py",
)
