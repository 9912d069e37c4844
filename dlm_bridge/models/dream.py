"""Dream, Dream-Coder and DiffuCoder, Qwen2 bidirectional with shifted logits: spec, mapping.

Source: public modeling_dream.py, generation_utils.py and configs; arXiv 2508.15487, 2506.20639.
"""

from __future__ import annotations

from dlm_bridge.models.decoder_mapping import dense_mapping
from dlm_bridge.models.families import FamilySpec

MAPPING = dense_mapping({"max_position_embeddings": 32768}, frozenset({"qkv_bias"}))


SPEC = FamilySpec(
    name="dream",
    title="Dream, Dream-Coder, DiffuCoder",
    hub_ids=(
        "Dream-org/Dream-v0-Base-7B",
        "Dream-org/Dream-v0-Instruct-7B",
        "Dream-org/Dream-Coder-v0-Base-7B",
        "Dream-org/Dream-Coder-v0-Instruct-7B",
        "apple/DiffuCoder-7B-Base",
        "apple/DiffuCoder-7B-Instruct",
        "apple/DiffuCoder-7B-cpGRPO",
    ),
    architectures=("DreamModel",),
    model_type="Dream",
    config_class="dlm_bridge.models.modeling_dream:DreamConfig",
    model_class="dlm_bridge.models.modeling_dream:DreamModel",
    mapping=MAPPING,
    tokenizer_class="dlm_bridge.models.modeling_dream:DreamTokenizer",
    auto_classes=("AutoModel", "AutoModelForCausalLM"),  # the Hub's auto_map has the first; both have the output layer
    shift=True,
    mask_token_id=151666,
    objective="shifted",
    sft={"eos_padding": "row"},  # dLLM
    sampler={"algorithm": "dream"},
    checked_against="two public copies of modeling_dream.py, and of tokenization_dream.py",
)
