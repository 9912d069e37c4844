"""DiffLM's cases: MegaDLMs' gptneox_1.7b_dlm and, tied, gpt2_1b_dlm; neither config.json has a model type."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

CONFIG: dict[str, Any] = {
    "architectures": ["DiffLM"],
    "auto_map": {"AutoConfig": "configuration_dlm.DLMConfig", "AutoModelForCausalLM": "modeling_dlm.DiffLM"},
    "attention_dropout": 0.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "max_window_layers": 28,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 128,
    "mask_token_id": 126,
    "attn_mask_type": "bidirectional",
}

CASES = [
    FamilyCase("difflm", CONFIG, partial(standard_tensors, qk_norm=True), decoder_logits, mask_token_id=126),
    FamilyCase(
        "difflm",
        {**CONFIG, "tie_word_embeddings": True, "max_position_embeddings": 2048, "vocab_size": 125},
        partial(standard_tensors, qk_norm=True),
        decoder_logits,
        mask_token_id=126,
        label="tied",
    ),
]
