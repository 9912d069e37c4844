"""Adapters on megatron-core: its own linear layers load what is written, on two tensor parallel ranks, and compute."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from safetensors.torch import save_file

from dlm_bridge import Layout
from dlm_bridge.convert.checkpoints import open_checkpoint
from dlm_bridge.convert.lora.megatron import write_megatron_adapter
from dlm_bridge.convert.lora.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PeftAdapter
from tests.checkpoints import standard_tensors, write_hub_folder
from tests.interop.adapter_worker import FFN, HIDDEN, LAYERS, RANK, SCALE
from tests.processes import assert_ok, launch

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Results of each check on both ranks."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install 'dlm-bridge[megatron]'")
    root = tmp_path_factory.mktemp("adapters")
    write_hub_folder(root / "hub", LLAMA, standard_tensors(LLAMA))
    base = open_checkpoint(root / "hub")
    expected: dict[str, dict[str, torch.Tensor]] = {style: {} for style in LAYERS}
    for style in LAYERS:
        folder = root / f"peft-{style}"
        folder.mkdir()
        generator = torch.Generator().manual_seed(1)
        factors: dict[str, torch.Tensor] = {}
        for param in base.params:
            if param.layer is None or len(param.hub_shapes[0]) != 2:
                continue
            shared = torch.randn(RANK, param.hub_shapes[0][1], generator=generator)
            for name, (rows, columns) in zip(param.hub_names, param.hub_shapes, strict=True):
                module = f"base_model.model.{name.removesuffix('.weight')}"
                own = torch.randn(RANK, columns, generator=generator)
                factors[f"{module}.lora_A.weight"] = shared.clone() if style == "fused" else own
                factors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
        save_file(factors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (folder / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK}))
        adapter = PeftAdapter(folder, base)
        write_megatron_adapter(adapter, base, root / style, Layout(), style)  # read at another size than written
        for param in base.params:
            if param.layer != 1 or len(param.hub_shapes[0]) != 2:
                continue
            place = param.rule.megatron.removeprefix("decoder.layers.{layer}.").removesuffix(".weight") + ".adapter"
            deltas = [adapter.delta(name) for name in param.hub_names]
            expected[style][place] = param.to_megatron(deltas)
            for letter, delta in zip("qkv", deltas, strict=False):
                expected[style][f"{place}.adapter_{letter}"] = delta
    torch.save(expected, root / "expected.pt")
    return launch("tests.interop.adapter_worker", root)


@pytest.mark.parametrize("name", [f"{style} {place}" for style in LAYERS for place in LAYERS[style]])
def test_megatrons_layers_compute_the_adapters_change(report: dict[str, list[str]], name: str) -> None:
    assert_ok(name, report)
