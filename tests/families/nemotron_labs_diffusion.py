"""Nemotron-Labs-Diffusion's cases: the 8B model's config.json, and one whose original context is short."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits, yarn

ROPE: dict[str, Any] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
}

CONFIG: dict[str, Any] = {
    "ar_loss_weight": 1.0,
    "architectures": ["NemotronLabsDiffusionModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_implementation": "sdpa",
    "auto_map": {
        "AutoConfig": "configuration_nemotron_labs_diffusion.NemotronLabsDiffusionConfig",
        "AutoModel": "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel",
    },
    "block_size": 32,
    "bos_token_id": 1,
    "dlm_loss_weight": None,
    "dlm_paradigm": "bidirectional",
    "dp_varying_mask_ratio": False,
    "eos_token_id": 11,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "mask_token_id": 100,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "model_type": "nemotron_labs_diffusion",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_parameters": ROPE,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "5.0.0",
    "use_cache": False,
    "vocab_size": 128,
}

SHORT = {
    **CONFIG,
    "max_position_embeddings": 128,
    "rope_parameters": {**ROPE, "original_max_position_embeddings": 8, "beta_fast": 4.0, "beta_slow": 0.1},
}


def reference(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    input_ids: torch.Tensor,
    allowed: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Queries grow with the logarithm of how often the original context has passed (Llama 4's temperature)."""
    rope = config["rope_parameters"]

    def query_scale(at: torch.Tensor) -> torch.Tensor:
        passed = at.double() // rope["original_max_position_embeddings"]
        return 1 + rope["llama_4_scaling_beta"] * (1 + passed).log()

    return decoder_logits(
        tensors,
        config,
        input_ids,
        allowed,
        positions,
        root="encoder.",
        head="diffusion_head.weight",
        turn=yarn(rope),
        query_scale=query_scale,
    )


tensors = partial(standard_tensors, root="encoder.", head="diffusion_head.weight")

CASES = [
    FamilyCase("nemotron_labs_diffusion", CONFIG, tensors, reference, mask_token_id=100),
    FamilyCase("nemotron_labs_diffusion", SHORT, tensors, reference, mask_token_id=100, label="beyond-context"),
]
