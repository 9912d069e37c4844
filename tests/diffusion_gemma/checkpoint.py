"""A tiny DiffusionGemma checkpoint with random weights: the Hub's config.json and tensor names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import write_hub_folder

Tensors = dict[str, torch.Tensor]
# The keys of the public 26B-A4B config.json with tiny sizes. Sliding and full layers in turn, two head sizes.
CONFIG: dict[str, Any] = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "boi_token_id": 100,
    "canvas_length": 4,
    "dtype": "bfloat16",
    "eoi_token_id": 101,
    "image_token_id": 102,
    "initializer_range": 0.02,
    "model_type": "diffusion_gemma",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 16,
        "head_dim": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 128,
        "model_type": "diffusion_gemma_text",
        "moe_intermediate_size": 16,
        "num_attention_heads": 8,
        "num_experts": 4,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "top_k_experts": 2,
        "use_bidirectional_attention": "vision",
        "vocab_size": 110,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 16,
        "initializer_range": 0.02,
        "intermediate_size": 20,
        "max_position_embeddings": 128,
        "model_type": "gemma4_vision",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "patch_size": 2,
        "pooling_kernel_size": 1,
        "position_embedding_size": 12,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"},
        "standardize": True,
        "use_clipped_linears": False,
    },
}


def config_with(
    text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **top: Any
) -> dict[str, Any]:
    """The config with other values in its sections; one that is `...` is left out."""
    config = copy.deepcopy(CONFIG)
    for section, changes in ((config["text_config"], text), (config["vision_config"], vision), (config, top)):
        section |= changes or {}
        for key in [key for key, value in section.items() if value is ...]:
            del section[key]
    return config


def tensors(config: dict[str, Any] = CONFIG, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Every tensor that transformers saves for such a config, by its Hub name."""
    generator = torch.Generator().manual_seed(seed)
    made: Tensors = {}

    def put(prefix: str, **shapes: tuple[int, ...]) -> None:
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator)
            values = 1 + 0.1 * values if len(shape) == 1 else values * shape[-1] ** -0.5
            made[prefix + name.replace("__", ".")] = values.to(dtype)

    text = config["text_config"]
    hidden, ffn, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    experts, width = text["num_experts"], text["moe_intermediate_size"]
    decoder = "model.decoder."
    put(decoder, embed_tokens__weight=(text["vocab_size"], hidden), norm__weight=(hidden,))
    mlp = {"gate_proj__weight": (ffn, hidden), "up_proj__weight": (ffn, hidden), "down_proj__weight": (hidden, ffn)}
    put(decoder + "self_conditioning.", pre_norm__weight=(hidden,), **mlp)
    for number, kind in enumerate(text["layer_types"]):
        full = kind == "full_attention"
        size = text["global_head_dim" if full else "head_dim"]
        rows = text["num_global_key_value_heads" if full else "num_key_value_heads"] * size
        layer = f"{decoder}layers.{number}."
        put(layer, layer_scalar=(1,), experts__gate_up_proj=(experts, 2 * width, hidden))
        put(layer, experts__down_proj=(experts, hidden, width), router__proj__weight=(experts, hidden))
        put(layer, router__scale=(hidden,), router__per_expert_scale=(experts,))
        put(layer + "mlp.", **mlp)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            put(layer, **{f"{norm}_layernorm__weight": (hidden,)})
        for norm in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            put(layer, **{f"{norm}__weight": (hidden,)})
        put(layer + "self_attn.", q_proj__weight=(heads * size, hidden), k_proj__weight=(rows, hidden))
        put(layer + "self_attn.", q_norm__weight=(size,), k_norm__weight=(size,))
        put(layer + "self_attn.", o_proj__weight=(hidden, heads * size))
        if not full:
            put(layer + "self_attn.", v_proj__weight=(rows, hidden))
        put(f"model.encoder.language_model.layers.{number}.", layer_scalar=(1,))
    _put_vision(put, config["vision_config"], hidden)
    return made


def _put_vision(put: Any, vision: dict[str, Any], text_hidden: int) -> None:
    hidden, ffn, size = vision["hidden_size"], vision["intermediate_size"], vision["head_dim"]
    rows = vision["num_attention_heads"] * size
    tower = "model.encoder.vision_tower."
    put("model.encoder.embed_vision.", embedding_projection__weight=(text_hidden, hidden))
    put(tower + "patch_embedder.", input_proj__weight=(hidden, 3 * vision["patch_size"] ** 2))
    put(tower + "patch_embedder.", position_embedding_table=(2, vision["position_embedding_size"], hidden))
    if vision["standardize"]:
        put(tower, std_bias=(hidden,), std_scale=(hidden,))
    for number in range(vision["num_hidden_layers"]):
        layer = f"{tower}encoder.layers.{number}."
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            put(layer, **{f"{norm}_layernorm__weight": (hidden,)})
        put(layer + "self_attn.", q_norm__weight=(size,), k_norm__weight=(size,))
        for name in "qkv":
            put(layer + "self_attn.", **{f"{name}_proj__linear__weight": (rows, hidden)})
        put(layer + "self_attn.", o_proj__linear__weight=(hidden, rows))
        put(layer + "mlp.", gate_proj__linear__weight=(ffn, hidden), up_proj__linear__weight=(ffn, hidden))
        put(layer + "mlp.", down_proj__linear__weight=(hidden, ffn))


def write_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, config: dict[str, Any] = CONFIG
) -> Path:
    """The checkpoint in the Hub's layout: two shards with an index, a card."""
    config = copy.deepcopy(config)
    config["dtype"] = config["text_config"]["dtype"] = str(dtype).removeprefix("torch.")
    return write_hub_folder(folder, config, tensors(config, seed, dtype))
