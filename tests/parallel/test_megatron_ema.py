"""--ema-decay in the Megatron engine: by hand, through a resume, an export and a reshard; every layout against one
process. The Accelerate engine's: test_ema.py."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dlm_bridge import Bridge
from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.train.config import TrainConfig
from tests.convert.helpers import run_cli
from tests.parallel.megatron_cases import Files
from tests.parallel.megatron_ema_worker import CHANGES
from tests.parallel.megatron_worker import Results
from tests.processes import assert_ok
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("ema")).write_some(*CHANGES.subjects)


def options(files: Files, subject: str, **changes: Any) -> dict[str, Any]:
    small = {"from_scratch": False, "steps": 3, "save_interval": 1, "eval_interval": 0, "warmup_steps": 0}
    given = files.run_options("unused", subject, **small, ema_decay=0.75, **changes)
    return {name: value for name, value in given.items() if name not in ("output", "engine")}


def weights(run: Path, step: int | None = None, averaged: bool = False) -> dict[str, torch.Tensor]:
    place = run / "checkpoints" / ("" if step is None else f"iter_{step:07d}")
    bridge = Bridge.from_megatron(place, averaged=averaged)
    return {name: bridge.read(name) for name in bridge.hub_names()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], weight) for name, weight in wanted.items())


@pytest.mark.parametrize(
    ("subject", "sharded"),
    [
        ("masked", True),
        pytest.param("block-moe", True, marks=pytest.mark.slow),
        pytest.param("block-moe", False, marks=pytest.mark.slow),
    ],
)
def test_the_average_by_hand_through_a_resume_an_export_and_a_reshard(
    subject: str, sharded: bool, tmp_path: Path, on_megatron: Run, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """avg_1 = w_1, avg_n = 0.75 avg_(n - 1) + 0.25 w_n; with experts, whose bias is no parameter."""
    given = options(files, subject, distributed_optimizer=sharded)
    rows = on_megatron(tmp_path / "run", **given)
    average = {name: weight.double() for name, weight in weights(tmp_path / "run", 1).items()}
    for step in (2, 3):
        now = weights(tmp_path / "run", step)
        for name, weight in now.items():
            average[name] = weight.double() if "expert_bias" in name else 0.75 * average[name] + 0.25 * weight.double()
    found = weights(tmp_path / "run", averaged=True)
    assert found.keys() == average.keys() == now.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight.double(), average[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(weight, now[name]) or "expert_bias" in name, name

    shutil.rmtree(tmp_path / "run/checkpoints/iter_0000003")
    assert without_speed(on_megatron(tmp_path / "run", resume=True, **given)) == without_speed(rows)
    assert same(weights(tmp_path / "run", averaged=True), found)

    run = tmp_path / "run/checkpoints"
    code, _, err = run_cli(capsys, "export", run, tmp_path / "averaged", "--ema")
    assert code == 0, err
    exported = {k: v for file in (tmp_path / "averaged").glob("*.safetensors") for k, v in load_file(file).items()}
    assert same(exported, found)
    code, _, err = run_cli(
        capsys, "reshard", run, tmp_path / "cut", "--tp", "2", *(("--ep", "2") if "moe" in subject else ())
    )
    assert code == 0, err
    resharded = Bridge.from_megatron(tmp_path / "cut", averaged=True)
    assert same({name: resharded.read(name) for name in resharded.hub_names()}, found)


def test_what_is_refused(tmp_path: Path, on_megatron: Run, files: Files) -> None:
    from dlm_bridge.parallel.train.mcore_config import optimizer_config

    given: dict[str, Any] = {"model": "m", "data": ["d"], "output": "o", "engine": "megatron", "ema_decay": 0.9}
    given["precision"] = "fp32"
    for changes, field in (
        ({"fsdp": "optim_grads_params"}, "fsdp"),
        ({"local_folder": "l", "local_interval": 1}, "local_folder"),
        ({"optimizer_cpu_offload": True, "precision": "bf16"}, "optimizer_cpu_offload"),
        ({"lora_rank": 2}, "ema_decay"),
    ):
        with refused(SettingError, field):
            TrainConfig.from_flags(**(given | changes))
    inside = TrainConfig.from_flags(**given, megatron=["optimizer.use_precision_aware_optimizer=true"])
    with refused(SettingError, "ema_decay"):
        optimizer_config(inside)
    on_megatron(tmp_path / "run", **{**options(files, "masked"), "steps": 1, "ema_decay": 0.0})
    with pytest.raises(DlmBridgeError, match=r"average|ema"):
        Bridge.from_megatron(tmp_path / "run/checkpoints", averaged=True)


@pytest.mark.slow
def test_both_engines_average_alike(tmp_path: Path, run: Run, on_megatron: Run, files: Files) -> None:
    given = options(files, "masked", adam_eps=1.0)
    run(tmp_path / "accelerate", **given)
    on_megatron(tmp_path / "megatron", **given)
    found = weights(tmp_path / "megatron", averaged=True)
    wanted = load_file(tmp_path / "accelerate/checkpoints/step-0000003/ema/model.safetensors")
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False])
def test_half_precision_averages_main_params(sharded: bool, tmp_path: Path, bf16_run: Run) -> None:
    """Not their rounding, which is as near as rounding is; a resume is exact."""
    given: dict[str, Any] = {"distributed_optimizer": sharded, "ema_decay": 0.5, "save_interval": 1, "steps": 3}
    rows = bf16_run(tmp_path / "run", **given)
    found = weights(tmp_path / "run", averaged=True)
    one, two, three = (weights(tmp_path / "run", step) for step in (1, 2, 3))
    for name, weight in found.items():
        assert (weight.dtype, three[name].dtype) == (torch.float32, torch.bfloat16)
        rounded = 0.25 * one[name].float() + 0.25 * two[name].float() + 0.5 * three[name].float()
        largest = torch.stack([one[name], two[name], three[name]]).abs().amax(dim=0).float()
        assert bool(((weight - rounded).abs() <= 2**-8 * largest + 1e-30).all()), name
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in found.values())
    shutil.rmtree(tmp_path / "run/checkpoints/iter_0000003")
    assert without_speed(bf16_run(tmp_path / "run", resume=True, **given)) == without_speed(rows)
    assert same(weights(tmp_path / "run", averaged=True), found)


@pytest.fixture(scope="module")
def said(files: Files) -> Results:
    return CHANGES.launch("tests.parallel.megatron_ema_worker", files.root)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "name"), CHANGES.checks)
def test_processes(processes: int, name: str, said: Results) -> None:
    """Losses and gradient norms of a run that stops in one layout and goes on in another are those of one process."""
    assert_ok(name, said[processes], processes)


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "name"), CHANGES.runs)
def test_averages_are_those_of_one_process(subject: str, name: str, files: Files, said: Results) -> None:
    names = (name, CHANGES.whole(subject))
    found, wanted = (weights(files.run(name), averaged=True) for name in names)
    plain = weights(files.run(names[1]))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), (name, (found[name] - tensor).abs().max())
    assert any(float((plain[name] - tensor).abs().max()) > 1e-4 for name, tensor in wanted.items())
