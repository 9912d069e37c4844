"""Acme: spec and mapping. Imports neither torch nor transformers, so that conversions start fast."""

from dlm_bridge.models.decoder_mapping import dense_mapping
from dlm_bridge.models.families import FamilySpec

SPEC = FamilySpec(
    name="acme",
    title="Acme",
    hub_ids=(),
    architectures=("AcmeLM",),  # of config.json
    model_type="acme",
    config_class="acme_dlm.modeling_acme:AcmeConfig",
    model_class="acme_dlm.modeling_acme:AcmeLM",
    mapping=dense_mapping({"num_key_value_heads": 32}, frozenset({"qkv_bias"})),  # Qwen2's names; config defaults
    mask_token_id=99,
    sampler={"algorithm": "llada"},
)
