"""One tiny checkpoint of each autoregressive family: the Hub's config.json key for key, and the Hub's tensor names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.models.families import FamilySpec, family_by_name
from tests.autoregressive.published import (
    DEEPSEEK_V3,
    GEMMA_2,
    GEMMA_3,
    GLM_45,
    GPT_OSS,
    GRANITE_3,
    LING_MINI,
    LLAMA_2,
    LLAMA_31,
    LLAMA_32,
    MISTRAL_1,
    MIXTRAL,
    NEMO,
    OLMO_2,
    OLMO_3,
    OLMOE,
    PHI_3,
    QWEN_3,
    QWEN_3_MOE,
    QWEN_25,
    SEED_OSS,
    SMOLLM_3,
)
from tests.checkpoints import write_hub_folder

Tensors = dict[str, torch.Tensor]
TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 130}


class Random:
    """Random weights of a size that keeps activations near one."""

    def __init__(self, config: dict[str, Any], seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.hidden = config["hidden_size"]

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=self.generator) * columns**-0.5).to(self.dtype)

    def vector(self, size: int, mean: float = 1.0) -> torch.Tensor:
        return (mean + 0.1 * torch.randn(size, generator=self.generator)).to(self.dtype)

    def mlp(
        self, prefix: str, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Tensors:
        gate, up, down = names
        return {
            f"{prefix}{gate}.weight": self.matrix(width, self.hidden),
            f"{prefix}{up}.weight": self.matrix(width, self.hidden),
            f"{prefix}{down}.weight": self.matrix(self.hidden, width),
        }


def model_tensors(config: dict[str, Any], random: Random, layer: Callable[[str, int], Tensors]) -> Tensors:
    rows, hidden = config["vocab_size"], config["hidden_size"]
    tensors = {"model.embed_tokens.weight": random.matrix(rows, hidden), "model.norm.weight": random.vector(hidden)}
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = random.matrix(rows, hidden)
    for number in range(config["num_hidden_layers"]):
        tensors |= layer(f"model.layers.{number}.", number)
    return tensors


def attention(config: dict[str, Any], random: Random, block: str, bias: bool = False, norm: str = "") -> Tensors:
    """`norm` is "head" for Qwen3's, "row" for OLMoE's."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    tensors = {
        block + "input_layernorm.weight": random.vector(hidden),
        block + "post_attention_layernorm.weight": random.vector(hidden),
        block + "self_attn.o_proj.weight": random.matrix(hidden, heads * size),
    }
    for name, count in (("q", heads), ("k", config["num_key_value_heads"]), ("v", config["num_key_value_heads"])):
        tensors[f"{block}self_attn.{name}_proj.weight"] = random.matrix(count * size, hidden)
        if bias:
            tensors[f"{block}self_attn.{name}_proj.bias"] = random.vector(count * size, 0)
        if norm and name != "v":
            tensors[f"{block}self_attn.{name}_norm.weight"] = random.vector(size if norm == "head" else count * size)
    return tensors


def dense(bias: bool = False, norm: str = "", frequencies: bool = False) -> Callable[..., Tensors]:
    def build(config: dict[str, Any], seed: int, dtype: torch.dtype) -> Tensors:
        random = Random(config, seed, dtype)

        def layer(block: str, number: int) -> Tensors:
            tensors = attention(config, random, block, bias, norm)
            if frequencies:  # fp32, whatever the weights are
                tensors[block + "self_attn.rotary_emb.inv_freq"] = 10000 ** -(torch.arange(0, 16, 2) / 16)
            return tensors | random.mlp(block + "mlp.", config["intermediate_size"])

        return model_tensors(config, random, layer)

    return build


def renormed(build: Callable[..., Tensors], added: tuple[str, ...], dropped: str = "") -> Callable[..., Tensors]:
    """With other norms in each layer; the output layer is tied where the config says nothing."""

    def changed(config: dict[str, Any], seed: int, dtype: torch.dtype) -> Tensors:
        tensors = build({"tie_word_embeddings": True, **config}, seed, dtype)
        random = Random(config, seed + 1, dtype)
        for number in range(config["num_hidden_layers"]):
            for name in added:
                tensors[f"model.layers.{number}.{name}.weight"] = random.vector(config["hidden_size"])
        return {name: tensor for name, tensor in tensors.items() if not dropped or dropped not in name}

    return changed


def fused(build: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Phi-3's: query, key and value in one matrix, gate and up in another."""

    def changed(config: dict[str, Any], seed: int, dtype: torch.dtype) -> Tensors:
        tensors = build(config, seed, dtype)
        for number in range(config["num_hidden_layers"]):
            block = f"model.layers.{number}."
            for parts, name in ((("q", "k", "v"), "self_attn.qkv"), (("gate", "up"), "mlp.gate_up")):
                inside = block + name.partition(".")[0] + "."
                whole = [tensors.pop(f"{inside}{part}_proj.weight") for part in parts]
                tensors[f"{block}{name}_proj.weight"] = torch.cat(whole)
        return tensors

    return changed


def experts(norm: str, key: str = "moe_intermediate_size") -> Callable[..., Tensors]:
    def build(config: dict[str, Any], seed: int, dtype: torch.dtype) -> Tensors:
        random = Random(config, seed, dtype)

        def layer(block: str, number: int) -> Tensors:
            tensors = attention(config, random, block, norm=norm)
            tensors[block + "mlp.gate.weight"] = random.matrix(config["num_experts"], config["hidden_size"])
            for expert in range(config["num_experts"]):
                tensors |= random.mlp(f"{block}mlp.experts.{expert}.", config[key])
            return tensors

        return model_tensors(config, random, layer)

    return build


def mixtral(config: dict[str, Any], seed: int, dtype: torch.dtype) -> Tensors:
    random = Random(config, seed, dtype)

    def layer(block: str, number: int) -> Tensors:
        tensors = attention(config, random, block)
        moe = block + "block_sparse_moe."
        tensors[moe + "gate.weight"] = random.matrix(config["num_local_experts"], config["hidden_size"])
        for expert in range(config["num_local_experts"]):
            tensors |= random.mlp(f"{moe}experts.{expert}.", config["intermediate_size"], ("w1", "w3", "w2"))
        return tensors

    return model_tensors(config, random, layer)


def gpt_oss(config: dict[str, Any], seed: int, dtype: torch.dtype) -> Tensors:
    """Experts in one tensor each, transposed; biases everywhere, sinks of each head."""
    random = Random(config, seed, dtype)
    hidden, width, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]

    def layer(block: str, number: int) -> Tensors:
        tensors = attention(config, random, block, bias=True)
        tensors[block + "self_attn.o_proj.bias"] = random.vector(hidden, 0)
        tensors[block + "self_attn.sinks"] = random.vector(config["num_attention_heads"], 0)
        tensors[block + "mlp.router.weight"] = random.matrix(count, hidden)
        tensors[block + "mlp.router.bias"] = random.vector(count, 0)
        for name, rows, columns in (("gate_up_proj", hidden, 2 * width), ("down_proj", width, hidden)):
            matrices = [random.matrix(columns, rows).T for _ in range(count)]
            tensors[f"{block}mlp.experts.{name}"] = torch.stack(matrices).contiguous()
            tensors[f"{block}mlp.experts.{name}_bias"] = random.vector(count * columns, 0).view(count, columns)
        return tensors

    return model_tensors(config, random, layer)


def latent_attention(config: dict[str, Any], random: Random, block: str) -> Tensors:
    hidden, heads, attn = config["hidden_size"], config["num_attention_heads"], block + "self_attn."
    q_lora, kv_lora = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    tensors = {
        block + "input_layernorm.weight": random.vector(hidden),
        block + "post_attention_layernorm.weight": random.vector(hidden),
        attn + "kv_a_proj_with_mqa.weight": random.matrix(kv_lora + rope, hidden),
        attn + "kv_a_layernorm.weight": random.vector(kv_lora),
        attn + "kv_b_proj.weight": random.matrix(heads * (nope + value), kv_lora),
        attn + "o_proj.weight": random.matrix(hidden, heads * value),
    }
    if q_lora is None:
        return tensors | {attn + "q_proj.weight": random.matrix(heads * (nope + rope), hidden)}
    return tensors | {
        attn + "q_a_proj.weight": random.matrix(q_lora, hidden),
        attn + "q_a_layernorm.weight": random.vector(q_lora),
        attn + "q_b_proj.weight": random.matrix(heads * (nope + rope), q_lora),
    }


def with_mtp(attention_of: Callable[[dict[str, Any], Random, str], Tensors]) -> Callable[..., Tensors]:
    """Glm4-MoE's and DeepSeek-V3's layout: dense layers first, then experts with a shared one, then MTP layers."""

    def build(config: dict[str, Any], seed: int, dtype: torch.dtype) -> Tensors:
        random = Random(config, seed, dtype)
        hidden, width, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]

        def layer(block: str, number: int) -> Tensors:
            tensors = attention_of(config, random, block)
            if number < config["first_k_dense_replace"]:
                return tensors | random.mlp(block + "mlp.", config["intermediate_size"])
            tensors[block + "mlp.gate.weight"] = random.matrix(count, hidden)
            bias = random.vector(count, 0).float()  # fp32, whatever the weights are
            tensors[block + "mlp.gate.e_score_correction_bias"] = bias
            for expert in range(count):
                tensors |= random.mlp(f"{block}mlp.experts.{expert}.", width)
            return tensors | random.mlp(block + "mlp.shared_experts.", width * config["n_shared_experts"])

        tensors = model_tensors(config, random, layer)
        for number in range(config["num_nextn_predict_layers"]):
            block = f"model.layers.{config['num_hidden_layers'] + number}."
            tensors |= layer(block, config["num_hidden_layers"] + number)
            tensors |= {
                block + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
                block + "enorm.weight": random.vector(hidden),
                block + "hnorm.weight": random.vector(hidden),
                block + "eh_proj.weight": random.matrix(hidden, 2 * hidden),
                block + "shared_head.norm.weight": random.vector(hidden),
                block + "shared_head.head.weight": tensors["lm_head.weight"].clone(),
            }
        return tensors

    return build


def ling(config: dict[str, Any], seed: int, dtype: torch.dtype) -> Tensors:
    """Bailing-MoE-V2's layout: fused QKV, a dense layer first, then experts with a shared one, then MTP layers."""
    random = Random(config, seed, dtype)
    hidden, width, size = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * size

    def layer(block: str, number: int) -> Tensors:
        tensors = {
            block + "input_layernorm.weight": random.vector(hidden),
            block + "post_attention_layernorm.weight": random.vector(hidden),
            block + "attention.query_key_value.weight": random.matrix(
                queries + 2 * config["num_key_value_heads"] * size, hidden
            ),
            block + "attention.query_layernorm.weight": random.vector(size),
            block + "attention.key_layernorm.weight": random.vector(size),
            block + "attention.dense.weight": random.matrix(hidden, queries),
        }
        if number < config["first_k_dense_replace"]:
            return tensors | random.mlp(block + "mlp.", config["intermediate_size"])
        tensors[block + "mlp.gate.weight"] = random.matrix(config["num_experts"], hidden)
        tensors[block + "mlp.gate.expert_bias"] = random.vector(config["num_experts"], 0).float()
        for expert in range(config["num_experts"]):
            tensors |= random.mlp(f"{block}mlp.experts.{expert}.", width)
        return tensors | random.mlp(block + "mlp.shared_experts.", width)

    tensors = model_tensors(config, random, layer)
    tensors["model.word_embeddings.weight"] = tensors.pop("model.embed_tokens.weight")
    for number in range(config["num_nextn_predict_layers"]):
        block = f"model.layers.{config['num_hidden_layers'] + number}."
        tensors |= layer(block, config["num_hidden_layers"] + number)
        tensors |= {block + f"{name}.weight": random.vector(hidden) for name in ("enorm", "hnorm", "final_layernorm")}
        tensors[block + "eh_proj.weight"] = random.matrix(hidden, 2 * hidden)
    return tensors


@dataclass(frozen=True)
class Case:
    """`published` is the Hub's config.json; `tiny` its sizes shrunk."""

    label: str
    family: str
    published: dict[str, Any]
    tiny: dict[str, Any]
    build: Callable[[dict[str, Any], int, torch.dtype], Tensors]
    megatron: bool = True  # whether Megatron can hold it
    live: bool = True  # whether megatron-core can run it

    @property
    def spec(self) -> FamilySpec:
        return family_by_name(self.family)

    @property
    def config(self) -> dict[str, Any]:
        return {**self.published, **TINY, **self.tiny}

    def tensors(self, dtype: torch.dtype = torch.float32, **overrides: Any) -> Tensors:
        return self.build({**self.config, **overrides}, 0, dtype)

    def write(self, folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
        config = {**self.config, "torch_dtype": str(dtype).removeprefix("torch."), **overrides}
        return write_hub_folder(folder, config, self.build(config, 0, dtype), shards=3)


NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 96}
ROUTED = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 4,
}

FEEDFORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")

CASES = (
    Case("llama2", "llama", LLAMA_2, {**GROUPED, "num_key_value_heads": 4}, dense(frequencies=True)),
    Case("llama3.1", "llama", LLAMA_31, GROUPED, dense()),
    Case("llama3.2", "llama", LLAMA_32, {**GROUPED, "head_dim": 16}, dense()),
    Case("qwen2.5", "qwen2", QWEN_25, GROUPED, dense(bias=True)),
    Case("qwen2.5-tied", "qwen2", {**QWEN_25, "tie_word_embeddings": True}, GROUPED, dense(bias=True)),
    Case("qwen3", "qwen3", QWEN_3, {**GROUPED, "head_dim": 32}, dense(norm="head")),
    Case("mistral", "mistral", MISTRAL_1, GROUPED, dense()),
    Case("mistral-nemo", "mistral", NEMO, {**GROUPED, "head_dim": 24}, dense()),
    Case(
        "qwen3-moe", "qwen3_moe", QWEN_3_MOE, {**GROUPED, **ROUTED, "head_dim": 32, "num_experts": 4}, experts("head")
    ),
    Case("mixtral", "mixtral", MIXTRAL, {**GROUPED, "num_local_experts": 4}, mixtral),
    Case(
        "glm4-moe",
        "glm4_moe",
        GLM_45,
        {**GROUPED, **ROUTED, "head_dim": 24, "first_k_dense_replace": 1, "n_routed_experts": 4, "pad_token_id": 0},
        with_mtp(lambda config, random, block: attention(config, random, block, bias=True, norm="head")),
    ),
    Case(
        "olmoe",
        "olmoe",
        OLMOE,
        {"num_key_value_heads": 4, "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
        experts("row", "intermediate_size"),
        megatron=False,
    ),
    Case("deepseek-v3", "deepseek_v3", DEEPSEEK_V3, LATENT, with_mtp(latent_attention)),
    Case(
        "ling",
        "bailing_moe_v2",
        LING_MINI,
        {
            **GROUPED,
            **ROUTED,
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        ling,
    ),
    Case(
        "gpt-oss",
        "gpt_oss",
        GPT_OSS,
        {
            **GROUPED,
            "intermediate_size": 32,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 6,
            "pad_token_id": 0,
        },
        gpt_oss,
    ),
    Case("seed-oss", "seed_oss", SEED_OSS, {**GROUPED, "head_dim": 24, **NO_DROPOUT}, dense(bias=True)),
    Case(
        "smollm3",
        "smollm3",
        SMOLLM_3,
        {**GROUPED, "no_rope_layers": [1, 0, 1, 0], "pad_token_id": 0},
        renormed(dense(), ()),
    ),
    Case("phi3", "phi3", PHI_3, GROUPED, fused(dense())),
    Case("granite", "granite", GRANITE_3, {**GROUPED, **NO_DROPOUT}, dense(), live=False),
    Case(
        "olmo2",
        "olmo2",
        OLMO_2,
        {**GROUPED, "num_key_value_heads": 4},
        renormed(dense(norm="row"), ("post_feedforward_layernorm",), dropped="input_layernorm"),
        megatron=False,
    ),
    Case(
        "olmo3",
        "olmo3",
        OLMO_3,
        {**GROUPED, "layer_types": [*["sliding_attention"] * 3, "full_attention"], "sliding_window": 6},
        renormed(dense(norm="row"), ("post_feedforward_layernorm",), dropped="input_layernorm"),
        megatron=False,
    ),
    Case(
        "gemma2",
        "gemma2",
        GEMMA_2,
        {**GROUPED, "head_dim": 16, "sliding_window": 6},
        renormed(dense(), FEEDFORWARD_NORMS),
        megatron=False,
    ),
    Case(
        "gemma3",
        "gemma3_text",
        GEMMA_3,
        {**GROUPED, "head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 2},
        renormed(dense(norm="head"), FEEDFORWARD_NORMS),
        megatron=False,
    ),
    Case("deepseek-direct-q", "deepseek_v3", DEEPSEEK_V3, {**LATENT, "q_lora_rank": None}, with_mtp(latent_attention)),
)
