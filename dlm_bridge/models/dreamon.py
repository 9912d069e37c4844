"""DreamOn, Dream-Coder with tokens that change the length of what is filled: spec. Tensors and body are Dream's.

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
    architectures=(),  # Dream's, without which it is told by its name or by the key
    told_from=("dream", "expand_token_id"),
    config_class="dlm_bridge.models.modeling_dreamon:DreamOnConfig",
    model_class="dlm_bridge.models.modeling_dreamon:DreamOnModel",
    tokenizer_class="",  # Dream's, found by its name
    objective="dreamon",
    sft={},  # the end of text, with which Dream's rows are filled, deletes
    sampler={"algorithm": "dreamon"},
    checked_against="what Dream's classes were; sampler and objective against the code of DreamLM/DreamOn",
)
