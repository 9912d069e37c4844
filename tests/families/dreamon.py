"""DreamOn's case: Dream's config.json with the token that expands a mask, both in reach of the tiny vocabulary."""

from __future__ import annotations

from functools import partial

from tests.checkpoints import standard_tensors
from tests.families import dream
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

CASE = FamilyCase(
    "dreamon",
    {**dream.CONFIG, "eos_token_id": 125, "expand_token_id": 126},
    partial(standard_tensors, qkv_bias=True),
    decoder_logits,
    mask_token_id=151666,
    tokenizer=dream.TOKENIZER,
)
