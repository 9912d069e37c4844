"""DiffuLLaMA's case: Llama-2's config.json, which says nothing of diffusion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import standard_tensors, write_tokenizer
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.2",
    "use_cache": True,
    "vocab_size": 128,
}


CASE = FamilyCase("diffullama", CONFIG, standard_tensors, decoder_logits, mask_token_id=811)


def write_with_ordinary_mask(folder: Path) -> Path:
    """A tiny DiffuLLaMA that likes to write its mask token, which is its tokenizer's piece "the"."""
    ids = {"vocab_size": 272, "mask_token_id": 257, "eos_token_id": 258, "max_position_embeddings": 256}
    CASE.write(folder, **ids, pad_token_id=258)
    write_tokenizer(folder, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    model = CASE.load(folder)
    with torch.no_grad():
        model.lm_head.weight[257] = 40 * model.lm_head.weight[100]
    model.save_pretrained(folder)
    return folder
