"""CoDA-1.7B, Qwen3 adapted to masked diffusion of code, bidirectional with shifted logits: spec, mapping.

Source: SalesforceAIResearch/CoDA (CoDALanguageModel, config.json, README).
"""

from __future__ import annotations

from dlm_bridge.models.decoder_mapping import SUPPORTED_VALUES, dense_mapping
from dlm_bridge.models.families import FamilySpec

REQUIRED = {**SUPPORTED_VALUES, "tie_word_embeddings": False}  # the original code ignores the config here
MAPPING = dense_mapping(
    {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 1e6},
    frozenset({"qk_norm"}),
    required=REQUIRED,
)


SPEC = FamilySpec(
    name="coda",
    title="CoDA-1.7B",
    hub_ids=("Salesforce/CoDA-v0-Instruct",),
    architectures=("CoDALanguageModel",),
    model_type="CoDA",
    config_class="dlm_bridge.models.modeling_coda:CoDAConfig",
    model_class="dlm_bridge.models.modeling_coda:CoDALanguageModel",
    mapping=MAPPING,
    shift=True,
    mask_token_id=151669,
    objective="shifted_floor",
    sft={"eos_padding": "row"},
    sampler={"algorithm": "dream"},
    checked_against="SalesforceAIResearch/CoDA's modeling_coda.py",
)
