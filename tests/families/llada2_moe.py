"""LLaDA2's cases: 2.0, which is 2.1's too, and 2.2."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase, Tensors
from tests.families.llada import TOKENIZER
from tests.reference import Router, decoder_logits, rotate

# Key for key the public LLaDA2.0-mini config.json, but for the sizes; it has neither a mask token nor a block size.
CONFIG: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "model_type": "llada2_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "norm_head": False,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_key_value_heads": 2,
    "rope_theta": 600000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "use_bias": False,
    "use_rmsnorm": True,
    "rms_norm_eps": 1e-06,
    "head_dim": 32,
    "num_shared_experts": 1,
    "use_cache": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "norm_softmax": False,
    "output_dropout": 0.0,
    "vocab_size": 110,
    "rotary_dim": 16,
    "using_split_qkv_in_self_attention": False,
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "score_function": "sigmoid",
    "initializer_range": 0.02,
    "max_window_layers": 28,
    "output_router_logits": False,
    "pad_token_id": 98,
    "partial_rotary_factor": 0.5,
    "use_sliding_window": False,
}

RENAMES = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.": ".self_attn.",
    ".query_layernorm.": ".q_norm.",
    ".key_layernorm.": ".k_norm.",
    ".dense.": ".o_proj.",
}


def tensors(config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """The router's tensors are fp32 whatever the others are."""
    plain = standard_tensors(config, seed, torch.float32, qk_norm=True)
    dense = standard_tensors({**config, "num_experts": 0}, seed, torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    found: Tensors = {}
    for name, tensor in plain.items():
        if name.startswith("model.layers.0.mlp."):
            continue
        for theirs, ours in RENAMES.items():
            name = name.replace(ours, theirs)
        if name.endswith((".k_proj.weight", ".v_proj.weight")):
            continue
        if name.endswith(".attention.q_proj.weight"):
            prefix = name.replace("attention.q_proj.weight", "self_attn.")
            parts = [plain[f"{prefix}{part}_proj.weight"] for part in "qkv"]
            name, tensor = name.replace("q_proj", "query_key_value"), torch.cat(parts)
        if name.endswith("mlp.gate.weight"):
            mlp = name.removesuffix("gate.weight")
            found[name] = tensor
            found[mlp + "gate.expert_bias"] = 0.1 * torch.randn(config["num_experts"], generator=generator)
            for part in ("gate_proj", "up_proj", "down_proj"):
                shape = plain[f"{mlp}experts.0.{part}.weight"].shape
                shared = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                found[f"{mlp}shared_experts.{part}.weight"] = shared.to(dtype)
            continue
        found[name] = tensor.to(dtype)
    found["lm_head.weight"] = found["lm_head.weight"] / 2  # scaled experts make large activations; logits near one
    for part in ("gate_proj", "up_proj", "down_proj"):
        found[f"model.layers.0.mlp.{part}.weight"] = dense[f"model.layers.0.mlp.{part}.weight"].to(dtype)
    return found


def group_limited_router(config: dict[str, Any]) -> Router:
    """Sigmoid scores; the bias takes part in the choice alone. Groups are ranked by the sum of their best two, and
    only the best groups' experts can be chosen; the chosen scores are renormalised and scaled."""

    def route(x: torch.Tensor, w: Tensors) -> torch.Tensor:
        scores = (x @ w["mlp.gate.weight"].T).sigmoid()
        grouped = (scores + w["mlp.gate.expert_bias"]).unflatten(-1, (config["n_group"], -1))
        ranks = grouped.sort(-1, descending=True).values[..., :2].sum(-1).argsort(-1, descending=True)
        allowed = torch.zeros(grouped.shape[:-1], dtype=torch.bool)
        allowed.scatter_(-1, ranks[..., : config["topk_group"]], True)
        candidates = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
        chosen = candidates.argsort(-1, descending=True)[..., : config["num_experts_per_tok"]]
        best = scores.gather(-1, chosen)
        weights = config["routed_scaling_factor"] * best / best.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter(-1, chosen, weights)

    return route


def block_router(config: dict[str, Any], allowed: torch.Tensor, positions: torch.Tensor) -> Router:
    """LLaDA2.2's: a block's tokens share the experts of which some token of the block scores highest, bias included;
    each takes its best of them."""
    real = allowed.diagonal(dim1=1, dim2=2)  # padding attends to nothing
    blocks = torch.where(real, positions // config["block_size"], -1 - torch.arange(positions.shape[1]))

    def route(x: torch.Tensor, w: Tensors) -> torch.Tensor:
        scores = (x @ w["mlp.gate.weight"].T).sigmoid()
        candidates = scores + w["mlp.gate.expert_bias"]
        weights = torch.zeros_like(scores)
        for row, numbers in enumerate(blocks):
            for block in numbers.unique():
                own = numbers == block
                shared = candidates[row, own].amax(0).argsort(descending=True)[: config["expert_capacity"]]
                for token in own.nonzero()[:, 0]:
                    order = candidates[row, token, shared].argsort(descending=True)
                    chosen = shared[order[: config["num_experts_per_tok"]]]
                    best = scores[row, token, chosen]
                    weights[row, token, chosen] = config["routed_scaling_factor"] * best / best.sum()
        return weights

    return route


def reference(
    tensors: Tensors, config: dict[str, Any], input_ids: torch.Tensor, allowed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The first half of every head turns; the second does not."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    sizes = [count * config["head_dim"] for count in (heads, groups, groups)]
    turning = int(config["head_dim"] * config["partial_rotary_factor"])

    def turn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.cat((rotate(x[..., :turning], at, config["rope_theta"]), x[..., turning:]), dim=-1)

    renamed: Tensors = {}
    for name, tensor in tensors.items():
        for theirs, ours in RENAMES.items():
            name = name.replace(theirs, ours)
        if "query_key_value" in name:
            parts = zip("qkv", tensor.split(sizes), strict=True)
            renamed |= {name.replace("query_key_value", f"{part}_proj"): rows for part, rows in parts}
        else:
            renamed[name] = tensor
    blocks = config.get("expert_capacity")
    route = block_router(config, allowed, positions) if blocks else group_limited_router(config)
    return decoder_logits(renamed, config, input_ids, allowed, positions, turn=turn, route=route)


CASE = FamilyCase(
    "llada2_moe", CONFIG, tensors, reference, mask_token_id=156895, block=32, sizes_of_blocks=(8,), tokenizer=TOKENIZER
)
# LLaDA2.2's keys beside those of 2.0, as its development guide in FluxServe lists them.
BLOCK_ROUTED = CONFIG | {
    "rope_theta": 3000000,
    "expert_capacity": 6,
    "block_size": 32,
    "delete_token_id": 101,
    "split_token_id": 102,
}
CASES = [
    CASE,
    FamilyCase(
        "llada2_moe",
        BLOCK_ROUTED,
        tensors,
        reference,
        mask_token_id=156895,
        label="2.2",
        block=32,
        sizes_of_blocks=(8,),
    ),
]
