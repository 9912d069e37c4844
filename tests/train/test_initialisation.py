"""Weights from (seed, Hub name): the published distributions, and the same values whoever asks in whatever order."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlm_bridge import Bridge
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.families import find_family
from dlm_bridge.models.initialisation import Normal, initialise
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.setup import model_source
from tests.checkpoints import llada_config
from tests.interop.autoregressive import CONFIGS

BLOCK = "model.transformer.blocks."


def _weights(seed: int = 0, **overrides: object) -> dict[str, torch.Tensor]:
    config = llada_config(d_model=128, mlp_hidden_size=256, **overrides)
    return dict(find_family(config).initial_weights(config, seed))


def test_a_tensor_depends_on_seed_and_name_alone() -> None:
    weights = _weights()
    for name in reversed(list(weights)):
        if not name.endswith(("norm.weight", "ln_f.weight")):
            layer = int(name.split(".")[3]) if BLOCK in name else None
            std = 128**-0.5
            if name.endswith("attn_out.weight") or (layer is not None and name.endswith("ff_out.weight")):
                std = (256 if name.endswith("ff_out.weight") else 128) ** -0.5 / math.sqrt(2 * (layer + 1))
            again = initialise(name, tuple(weights[name].shape), Normal(std, cutoff=3), seed=0)
            assert torch.equal(again, weights[name]), name
    fewer = _weights(n_layers=2)
    assert all(torch.equal(weights[name], tensor) for name, tensor in fewer.items())
    other = _weights(seed=1)
    assert not torch.equal(other[BLOCK + "0.q_proj.weight"], weights[BLOCK + "0.q_proj.weight"])
    assert not torch.equal(weights[BLOCK + "1.q_proj.weight"], weights[BLOCK + "0.q_proj.weight"])


@pytest.mark.parametrize("rows", [1 << 55, 1 << 63])
def test_a_tensor_that_memory_cannot_hold(rows: int) -> None:
    with pytest.raises(DlmBridgeError, match="embed"):
        initialise("embed", (rows, 4), Normal(1.0), seed=0)


def test_mitchell_has_the_published_spread_and_cutoff() -> None:
    weights = _weights(embedding_size=2000)
    embedding = weights["model.transformer.wte.weight"]
    # The spread of a normal distribution cut at three standard deviations.
    assert embedding.std().item() * 128**0.5 == pytest.approx(0.98658, rel=0.005)
    assert 2.9 < embedding.abs().max().item() * 128**0.5 <= 3.0
    assert embedding.mean().abs() < 1e-3
    down = [weights[f"{BLOCK}{layer}.ff_out.weight"].std().item() for layer in (0, 3)]
    assert down[0] * (2 * 256) ** 0.5 == pytest.approx(0.98658, rel=0.02)
    assert down[0] / down[1] == pytest.approx(2.0, rel=0.03)
    assert torch.equal(weights["model.transformer.ln_f.weight"], torch.ones(128))


def test_normal_scales_only_what_the_public_code_marks_as_residual() -> None:
    weights = _weights(init_fn="normal", init_std=0.05)
    assert weights[BLOCK + "2.attn_out.weight"].std().item() == pytest.approx(0.05, rel=0.03)
    assert weights[BLOCK + "2.ff_out.weight"].std().item() == pytest.approx(0.05 / math.sqrt(8), rel=0.03)
    assert weights["model.transformer.ff_out.weight"].abs().max() > 3 * 0.05
    cut = _weights(init_fn="normal", init_std=0.05, init_cutoff_factor=2)
    assert cut["model.transformer.ff_out.weight"].abs().max() <= 2 * 0.05 + 1e-7


def test_other_rules_are_refused_by_name() -> None:
    with pytest.raises(DlmBridgeError, match="'full_megatron'"):
        _weights(init_fn="full_megatron")


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_scratch_holds_exactly_these_tensors(tmp_path: Path, tied: bool) -> None:
    config = llada_config(weight_tying=tied, n_kv_heads=2)
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = model_source(
        TrainConfig.from_flags(model=str(tmp_path), data=["mock"], output="o", from_scratch=True, seed=5)
    ).load()
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    weights = dict(find_family(config).initial_weights(config, 5))
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("tied", [False, True])
def test_a_bridge_from_scratch_reads_the_same_values(tmp_path: Path, tied: bool) -> None:
    config = llada_config(weight_tying=tied, n_kv_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(config))
    bridge = Bridge.from_scratch(tmp_path, seed=5)
    bridge.checkpoint.check()
    weights = dict(find_family(config).initial_weights(config, 5))
    assert set(bridge.hub_names()) == weights.keys()
    assert all(torch.equal(bridge.read(name), tensor) for name, tensor in weights.items())


def test_a_bridge_from_scratch_has_no_layers_that_transformers_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["glm4_moe_mtp"]))
    bridge = Bridge.from_scratch(tmp_path, seed=0)
    bridge.checkpoint.check()
    assert bridge.dims.mtp == 0
    assert not any(".layers.4." in name for name in bridge.hub_names())


def test_a_bridge_from_scratch_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(DlmBridgeError, match=r"config\.json"):
        Bridge.from_scratch(tmp_path, seed=0)
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(DlmBridgeError, match="BertModel"):
        Bridge.from_scratch(tmp_path, seed=0)
    (tmp_path / "config.json").write_text(json.dumps(llada_config(init_fn="full_megatron")))
    with pytest.raises(DlmBridgeError, match="'full_megatron'"):
        Bridge.from_scratch(tmp_path, seed=0)
