"""DreamOn, Dream-Coder with tokens that expand and delete masks: spec. Tensors and body are Dream's.

Source: DreamLM/DreamOn (evaluation, training), public copies of the Hub's generation_utils.py, arXiv 2602.01326.
"""

from __future__ import annotations

from dataclasses import replace

from dlm_bridge.models import dream

EXPAND_TOKEN_ID = 151667

SPEC = replace(
    dream.SPEC,
    name="dreamon",
    title="DreamOn",
    hub_ids=("Dream-org/DreamOn-v0-7B",),
    architectures=(),  # Dream's: it is identified by `told_from`, or chosen by name
    told_from=("dream", "expand_token_id"),
    config_class="dlm_bridge.models.modeling_dreamon:DreamOnConfig",
    model_class="dlm_bridge.models.modeling_dreamon:DreamOnModel",
    tokenizer_class="",  # Dream's, which is registered
    objective="dreamon",
    sft={},  # rows are not padded with the end of text as Dream's, because it deletes masks
    sampler={"algorithm": "dreamon"},
    checked_against="the same as Dream; sampler and objective against the code of DreamLM/DreamOn",
)
