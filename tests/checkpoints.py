"""Small random checkpoints in the exact layout that each family has on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# Key for key the public GSAI-ML/LLaDA-8B-Base config.json; tests shrink the sizes.
LLADA_CONFIG: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
        "AutoModel": "modeling_llada.LLaDAModelLM",
    },
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_dropout": 0.0,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3",
    "use_cache": False,
    "vocab_size": 126464,
    "weight_tying": False,
}

TINY_LLADA: dict[str, Any] = {
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 4,
    "mlp_hidden_size": 96,
    "vocab_size": 128,
    "embedding_size": 128,
    "max_sequence_length": 256,
    "mask_token_id": 127,
    "eos_token_id": 126,
    "pad_token_id": 126,
}


def llada_config(**overrides: Any) -> dict[str, Any]:
    """The public config with tiny sizes; `overrides` win."""
    return {**LLADA_CONFIG, **TINY_LLADA, **overrides}


def llada_tensors(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random weights under the public names, of a size that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn = config["d_model"], config["mlp_hidden_size"]
    kv = hidden // config["n_heads"] * (config["n_kv_heads"] or config["n_heads"])
    rows = config["embedding_size"] or config["vocab_size"]

    def matrix(out_features: int, in_features: int) -> torch.Tensor:
        return (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).to(dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(dtype)

    root = "model.transformer."
    tensors = {root + "wte.weight": matrix(rows, hidden), root + "ln_f.weight": norm()}
    if not config["weight_tying"]:
        tensors[root + "ff_out.weight"] = matrix(rows, hidden)
    for layer in range(config["n_layers"]):
        block = f"{root}blocks.{layer}."
        tensors |= {
            block + "attn_norm.weight": norm(),
            block + "ff_norm.weight": norm(),
            block + "q_proj.weight": matrix(hidden, hidden),
            block + "k_proj.weight": matrix(kv, hidden),
            block + "v_proj.weight": matrix(kv, hidden),
            block + "attn_out.weight": matrix(hidden, hidden),
            block + "ff_proj.weight": matrix(ffn, hidden),
            block + "up_proj.weight": matrix(ffn, hidden),
            block + "ff_out.weight": matrix(hidden, ffn),
        }
    return tensors


def write_hub_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], shards: int = 2, seed: int = 0
) -> Path:
    """Write config.json, `shards` safetensors files with an index (tensors in random order over them, as on the Hub
    names and sizes never line up), and the side files that a Hub repository has."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    order = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(seed)).tolist()
    names = [list(tensors)[i] for i in order]
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            chosen = names[shard::shards]
            save_file({name: tensors[name] for name in chosen}, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(chosen, file)
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    # Never run: a file that would fail if it were.
    for reference in config.get("auto_map", {}).values():
        (folder / f"{reference.split('.')[0]}.py").write_text("raise SystemExit('remote code was executed')\n")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A card, with ünïcode\n")
    (folder / "generation_config.json").write_text(
        json.dumps({"_from_model_config": True, "eos_token_id": config.get("eos_token_id")}, indent=2) + "\n"
    )
    (folder / "assets").mkdir(exist_ok=True)
    (folder / "assets" / "logo.bin").write_bytes(bytes(range(256)))
    return folder


def write_llada(
    folder: Path, seed: int = 0, shards: int = 2, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """A tiny LLaDA checkpoint in the public layout."""
    config = llada_config(**{"torch_dtype": str(dtype).removeprefix("torch."), **overrides})
    return write_hub_folder(folder, config, llada_tensors(config, seed, dtype), shards)


def standard_tensors(
    config: dict[str, Any],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    root: str = "model.",
    head: str = "lm_head.weight",
) -> dict[str, torch.Tensor]:
    """Random weights under the names that transformers gives to a Llama-like body; experts where the config has them.

    The output layer is left out where the config ties it.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, heads, ffn, rows = (
        config[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    )
    head_dim = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads") or heads
    experts, moe_ffn = config.get("num_experts") or 0, config.get("moe_intermediate_size") or 0

    def matrix(out_features: int, in_features: int) -> torch.Tensor:
        return (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).to(dtype)

    def vector(size: int, mean: float) -> torch.Tensor:
        return (mean + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    def gated(prefix: str, width: int) -> dict[str, torch.Tensor]:
        return {
            prefix + "gate_proj.weight": matrix(width, hidden),
            prefix + "up_proj.weight": matrix(width, hidden),
            prefix + "down_proj.weight": matrix(hidden, width),
        }

    tensors = {root + "embed_tokens.weight": matrix(rows, hidden), root + "norm.weight": vector(hidden, 1)}
    if not config.get("tie_word_embeddings"):
        tensors[head] = matrix(rows, hidden)
    for layer in range(config["num_hidden_layers"]):
        block = f"{root}layers.{layer}."
        attention = block + "self_attn."
        tensors |= {
            block + "input_layernorm.weight": vector(hidden, 1),
            block + "post_attention_layernorm.weight": vector(hidden, 1),
            attention + "o_proj.weight": matrix(hidden, heads * head_dim),
        }
        for name, count in (("q", heads), ("k", groups), ("v", groups)):
            tensors[f"{attention}{name}_proj.weight"] = matrix(count * head_dim, hidden)
            if qkv_bias:
                tensors[f"{attention}{name}_proj.bias"] = vector(count * head_dim, 0)
            if qk_norm and name != "v":
                tensors[f"{attention}{name}_norm.weight"] = vector(head_dim, 1)
        if not experts:
            tensors |= gated(block + "mlp.", ffn)
            continue
        tensors[block + "mlp.gate.weight"] = matrix(experts, hidden)
        for expert in range(experts):
            tensors |= gated(f"{block}mlp.experts.{expert}.", moe_ffn)
    return tensors


def write_tokenizer(folder: Path, tokenizer_config: dict[str, Any]) -> None:
    """A tiny byte-level BPE tokenizer in every file form (tokenizer.json, vocab.json with merges.txt) and with the
    config given; the code that its auto_map names must never run."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)} | {"th": 256, "the": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [value for key, value in tokenizer_config.items() if key.endswith("_token") and isinstance(value, str)]
    tokenizer.add_special_tokens(sorted(set(special)))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    for references in tokenizer_config.get("auto_map", {}).values():
        for reference in references if isinstance(references, list) else [references]:
            if reference:
                file = folder / f"{reference.split('.')[0]}.py"
                file.write_text("raise SystemExit('remote code was executed')\n")
