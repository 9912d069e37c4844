"""Muon in the Megatron engine: against torch's, against the Accelerate engine, every layout against one process."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge
from dlm_bridge.errors import SettingError
from dlm_bridge.train import muon
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.muon import ADAMW_RMS, muon_update, orthogonalised, takes_muon
from tests.parallel.megatron_cases import Files
from tests.parallel.megatron_muon_worker import CHANGES, LR
from tests.parallel.megatron_worker import Results
from tests.processes import assert_ok
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
MUON = {"engine": "megatron", "precision": "fp32", "optimizer": "muon", "distributed_optimizer": False}
ATTENTION = {"q_proj", "k_proj", "v_proj", "attn_out"}
MOVED = {  # by Muon; an epsilon of 1 leaves AdamW's where they are
    "masked": {*ATTENTION, "ff_proj", "up_proj", "ff_out"},
    "block-moe": {"query_key_value", "dense", "gate_proj", "up_proj", "down_proj"},
}


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 40)])
def test_an_update_is_torchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, gradient = torch.zeros(shape), torch.randn(shape)
    weight.grad = gradient.clone()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
    assert torch.allclose(-ADAMW_RMS * muon_update(gradient), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "shape", "taken"),
    [
        ("model.layers.0.mlp.gate_proj.weight", (8, 4), True),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", (8, 4), True),
        ("model.layers.0.mlp.gate.weight", (4, 8), False),
        ("model.layers.0.router.proj.weight", (4, 8), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 8), False),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 8), False),
        ("model.layers.0.input_layernorm.weight", (8,), False),
    ],
)
def test_what_takes_muon(name: str, shape: tuple[int, ...], taken: bool) -> None:
    assert takes_muon(name, shape) == taken


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("muon")).write_some(*CHANGES.subjects)


@pytest.fixture
def with_muon(on_megatron: Run) -> Run:
    """`on_megatron` with Muon."""
    return partial(on_megatron, **MUON)


def weights(bridge: Bridge) -> dict[str, torch.Tensor]:
    return {name: bridge.read(name).float() for name in bridge.hub_names()}


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The iteration in fp32 in both engines: in bf16 a gradient's last bit may change an update's third digit."""
    monkeypatch.setattr(muon, "PRECISION", torch.float32)
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda gradient, *_: orthogonalised(gradient))


@pytest.mark.parametrize("subject", ["masked", pytest.param("block-moe", marks=pytest.mark.slow)])
def test_both_engines_make_the_same_step(
    subject: str, tmp_path: Path, run: Run, with_muon: Run, files: Files, fine: None
) -> None:
    """Query, key, value, gate and up each for themselves; experts and their router as there."""
    given = files.run_options("unused", subject, from_scratch=False, steps=1, save_interval=1, eval_interval=0)
    options = {name: value for name, value in given.items() if name not in ("output", "engine")}
    options |= {"optimizer": "muon", "lr": LR, "adam_eps": 1.0}
    run(tmp_path / "accelerate", **options)
    with_muon(tmp_path / "megatron", **options)
    found = weights(Bridge.from_megatron(tmp_path / "megatron/checkpoints"))
    wanted = weights(Bridge.from_hf(tmp_path / "accelerate/checkpoints/step-0000001"))
    begun = weights(Bridge.from_hf(files.hub(subject)))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), (name, (found[name] - tensor).abs().max())
    moved = [name for name, tensor in wanted.items() if float((tensor - begun[name]).abs().max()) > 1e-4]
    assert {name.rsplit(".", 2)[-2] for name in moved} == MOVED[subject]


@pytest.mark.slow
def test_a_run_resumes_exactly(tmp_path: Path, with_muon: Run, files: Files) -> None:
    given = files.run_options("unused", save_interval=2, eval_interval=0, lr_schedule="constant")
    options = {name: value for name, value in given.items() if name not in ("output", "engine")} | {
        "optimizer": "muon"
    }
    whole = with_muon(tmp_path / "whole", **{**options, "steps": 4})
    with_muon(tmp_path / "run", **{**options, "steps": 2})
    resumed = with_muon(tmp_path / "run", resume=True, **{**options, "steps": 4})
    assert without_speed(resumed) == without_speed(whole)
    found, wanted = (weights(Bridge.from_megatron(tmp_path / run / "checkpoints")) for run in ("run", "whole"))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.slow
def test_half_precision_updates_main_params(tmp_path: Path, bf16_run: Run) -> None:
    """And resumes exactly; the losses are those of fp32 but for rounding."""
    options: dict[str, Any] = {**MUON, "save_interval": 2, "lr": 1e-3}
    whole = bf16_run(tmp_path / "whole", steps=6, **options)
    bf16_run(tmp_path / "run", steps=2, **options)
    resumed = bf16_run(tmp_path / "run", resume=True, steps=6, **options)
    assert without_speed(resumed) == without_speed(whole)
    exact = bf16_run(tmp_path / "exact", steps=6, **{**options, "precision": "fp32"})
    assert [row["loss"] for row in whole] == pytest.approx([row["loss"] for row in exact], rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"distributed_optimizer": True}, "distributed_optimizer"),
        ({"distributed_optimizer": True, "fsdp": "optim_grads_params"}, "fsdp"),
        ({"precision": "fp8", "fp8_params": True}, "fp8_params"),
        ({"optimizer_cpu_offload": True, "precision": "bf16"}, "optimizer_cpu_offload"),
        ({"lora_rank": 2}, "optimizer"),
        ({"megatron": ["optimizer.muon_num_ns_steps=3"]}, "megatron"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], named: str) -> None:
    from dlm_bridge.parallel.train.mcore_config import optimizer_config

    with refused(SettingError, named):
        optimizer_config(TrainConfig.from_flags(model="m", data=["d"], output="o", **{**MUON, **changes}))


@pytest.fixture(scope="module")
def said(files: Files) -> Results:
    return CHANGES.launch("tests.parallel.megatron_muon_worker", files.root)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "name"), CHANGES.checks)
def test_processes(processes: int, name: str, said: Results) -> None:
    """Losses and gradient norms of a run that stops in one layout and goes on in another are those of one process."""
    assert_ok(name, said[processes], processes)


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "name"), CHANGES.runs)
def test_weights_are_those_of_one_process(subject: str, name: str, files: Files, said: Results) -> None:
    names = (name, CHANGES.whole(subject))
    found, wanted = (weights(Bridge.from_megatron(files.run(name) / "checkpoints")) for name in names)
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), (name, (found[name] - tensor).abs().max())
