"""Helpers of the adapter tests: a tiny Llama, adapters written by hand, conversions both ways."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dlm_bridge import Layout
from dlm_bridge.convert.checkpoints import open_checkpoint
from dlm_bridge.convert.lora import export_adapter, open_adapter
from dlm_bridge.convert.lora.megatron import write_megatron_adapter
from dlm_bridge.convert.lora.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PeftAdapter
from tests.convert.helpers import hub_tensors, same

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8


def to_megatron(base: Path, adapter: Path, output: Path, layout: Layout | None = None, style: str = "auto") -> Path:
    opened = open_checkpoint(base)
    write_megatron_adapter(PeftAdapter(adapter, opened), opened, output, layout or Layout(), style)
    return output


def back(base: Path, megatron: Path, output: Path) -> Path:
    opened = open_checkpoint(base)
    export_adapter(open_adapter(megatron, opened), opened, output)
    return output


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def set_weights(folder: Path, change: Any) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    change(tensors)
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def same_factors(one: Path, other: Path) -> bool:
    """True if two PEFT folders have the same tensors, bit for bit."""
    a, b = (load_file(folder / ADAPTER_WEIGHTS) for folder in (one, other))
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def written_adapter(base: Path, folder: Path, targets: Collection[str] = LINEAR) -> Path:
    """Adapter of linear layers, written without PEFT, which is quicker."""
    output = folder / "lora"
    output.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in hub_tensors(base).items():
        if name.split(".")[-2] in targets and ".experts." not in name:
            (rows, columns), module = tensor.shape, name.removesuffix(".weight")
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    save_file(tensors, output / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(targets), "bias": "none"}
    (output / ADAPTER_CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": "owner/base"}))
    return output
