"""iLLaDA's cases: the keys that modeling_illada.py reads, tied as published and untied."""

from __future__ import annotations

from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

CONFIG: dict[str, Any] = {
    "architectures": ["ILLaDAForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_illada.ILLaDAConfig",
        "AutoModel": "modeling_illada.ILLaDAForCausalLM",
        "AutoModelForCausalLM": "modeling_illada.ILLaDAForCausalLM",
    },
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_norm_eps": None,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "illada",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 1,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.1",
    "vocab_size": 128,
}

CASES = [
    FamilyCase("illada", CONFIG, standard_tensors, decoder_logits, mask_token_id=5),
    FamilyCase(
        "illada",
        {**CONFIG, "tie_word_embeddings": False},
        standard_tensors,
        decoder_logits,
        mask_token_id=5,
        label="untied",
    ),
]
