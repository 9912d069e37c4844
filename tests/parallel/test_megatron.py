"""The Megatron engine: every layout against one process, runs that stop and go on, and bad input."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from typer.testing import CliRunner

from dlm_bridge import Bridge
from dlm_bridge.cli.app import app
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.metrics import read_rows
from tests.convert.helpers import hub_tensors
from tests.parallel.megatron_cases import STEPS, Files
from tests.parallel.megatron_worker import WORLDS, plan
from tests.processes import assert_ok, forked, launch
from tests.train.conftest import read_metrics

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)
Said = dict[int, dict[str, list[str]]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    files = Files(tmp_path_factory.mktemp("megatron"))
    files.write()
    return files


@pytest.fixture(scope="module")
def said(files: Files) -> Said:
    """What each check said, by the number of processes."""
    launch("tests.parallel.megatron_worker", files.root, processes=1, timeout_s=1100)
    return {processes: forked(files.root / f"world{processes}", processes) for processes in WORLDS}


@pytest.mark.parametrize(("name", "run"), [("whole", {"steps": 8}), ("causal", {"subject": "causal", "steps": 6})])
def test_both_engines_agree(name: str, run: dict[str, Any], files: Files, said: Said) -> None:
    assert_both_engines_agree(files, name, run)


def assert_both_engines_agree(files: Files, name: str, run: dict[str, Any]) -> None:
    """The same options, weights from nothing."""
    found = _train_with_accelerate(files.run_options(f"accelerate-{name}", **{**run, "engine": "accelerate"}))
    wanted = read_metrics(files.run(name))[: run["steps"]]
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for one, two in zip(found, wanted, strict=True):
        assert ("param_norm" in one) == ("param_norm" in two) == (one["step"] % 3 == 0)
        for figure in {
            "loss",
            "grad_norm",
            "lr",
            "eval_loss",
            "tokens",
            "param_norm",
            "z_loss",
            "layer_grad_norms",
        } & two.keys():
            assert one[figure] == pytest.approx(two[figure], rel=1e-4), (figure, one, two)


def test_a_training_checkpoint_is_a_hub_model(files: Files, said: Said, tmp_path: Path) -> None:
    assert_is_a_hub_model(files, "terminated", "masked", tmp_path)


def assert_is_a_hub_model(files: Files, run: str, subject: str, tmp_path: Path) -> None:
    """Saved at two pipeline stages by megatron-core; transformers' model of it has the same validation loss."""
    Bridge.from_megatron(files.run(run) / "checkpoints").to_hf(tmp_path / "exported")
    unmoved = {"engine": "accelerate", "from_scratch": False, "lr": 0.0, "steps": 1, "eval_interval": 1}
    wanted = read_metrics(files.run(run))[-1]["eval_loss"]
    for place in (tmp_path / "exported", files.run(run) / "checkpoints"):
        options = files.run_options(f"from-{run}-{place.name}", subject, **unmoved, model=str(place))
        assert _train_with_accelerate(options)[-1]["eval_loss"] == pytest.approx(wanted, rel=1e-5)


def test_prediction_layers_come_back_as_they_were(files: Files, said: Said, tmp_path: Path) -> None:
    """From a run that was resumed at another layout, and has removed the checkpoint that it was resumed from."""
    found, before = Bridge.from_megatron(files.run("predicting") / "checkpoints"), Bridge.from_hf(files.predicting)
    assert found.checkpoint.iteration == "iter_0000004"
    assert found.hub_names() == before.hub_names()
    carried = {name for param in before.checkpoint.params if param.is_mtp for name in param.hub_names}
    assert len(carried) > 30
    for name in before.hub_names():
        same = torch.equal(found.read(name), before.read(name))
        assert same == (name in carried or name.endswith("correction_bias")), name
    found.to_hf(tmp_path / "exported")
    assert json.loads((tmp_path / "exported/config.json").read_text())["num_nextn_predict_layers"] == 1
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "exported"), str(found.checkpoint.root)]).exit_code == 0


def test_prediction_layers_that_are_trained_come_back_so(files: Files, said: Said, tmp_path: Path) -> None:
    """Under the Hub's names, from a run that was resumed at another layout; the loss of theirs is a figure of its
    own."""
    found, before = Bridge.from_megatron(files.run("predicted-cut") / "checkpoints"), files.hub("predicting")
    found.to_hf(tmp_path / "exported")
    exported, source = hub_tensors(tmp_path / "exported"), hub_tensors(before)
    shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (exported, source)]
    assert shapes[0] == shapes[1]
    trained = {name for param in found.checkpoint.params if param.is_mtp for name in param.hub_names}
    still = {name for name in source if torch.equal(exported[name], source[name])}
    assert len(trained) > 30
    assert all(name.endswith("correction_bias") for name in still)
    own, other = (read_metrics(files.run(run)) for run in ("predicted", "predicted-cut"))
    assert [row["mtp_loss"] for row in own] == pytest.approx([row["mtp_loss"] for row in other], rel=1e-4)
    assert all("mtp_loss" not in row for row in read_metrics(files.run("predicting")))


def test_the_config_says_what_was_trained(files: Files, said: Said, tmp_path: Path) -> None:
    Bridge.from_megatron(files.run("blocks") / "checkpoints").to_hf(tmp_path / "exported")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert (config["block_size"], config["mask_token_id"]) == (8, 98)


def test_commands_read_a_training_checkpoint(files: Files, said: Said, tmp_path: Path) -> None:
    checkpoints = str(files.run("whole") / "checkpoints")
    inspected = CliRunner().invoke(app, ["inspect", checkpoints, "--json"])
    assert inspected.exit_code == 0, inspected.output
    assert f'"iteration": {STEPS}' in json.dumps(json.loads(inspected.stdout))
    alone = CliRunner().invoke(app, ["verify", checkpoints, "--json"])
    assert alone.exit_code == 0, alone.output
    Bridge.from_megatron(checkpoints).to_hf(tmp_path / "exported")
    compared = CliRunner().invoke(app, ["verify", checkpoints, str(tmp_path / "exported"), "--json"])
    assert compared.exit_code == 0, compared.output
    different = CliRunner().invoke(app, ["verify", checkpoints, str(files.hub("masked")), "--json"])
    assert different.exit_code == 1, different.output


@pytest.mark.parametrize("run", ["terminated", "crashed"])  # the second saved in the background
def test_a_flipped_byte_of_a_training_checkpoint_is_found(run: str, files: Files, said: Said, tmp_path: Path) -> None:
    shutil.copytree(files.run(run) / "checkpoints", tmp_path / "checkpoints")
    folder = max((tmp_path / "checkpoints").glob("iter_*"))
    assert json.loads((folder / "dlm_bridge_files.json").read_text())["files"].keys() >= {".metadata", "metadata.json"}
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        middle = len(whole) // 2
        file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        found = CliRunner().invoke(app, ["verify", str(folder), "--json"])
        if file.name != "dlm_bridge_files.json":
            assert found.exit_code == 1, (file, found.output)
            (difference,) = json.loads(found.stdout)["differences"]
            assert difference["name"] == file.name
            assert ("parts of" in difference["detail"]) == (file.suffix == ".distcp")
        else:
            assert found.exit_code != 0
        file.write_bytes(whole)
    assert CliRunner().invoke(app, ["verify", str(folder)]).exit_code == 0
    max(folder.glob("*.distcp")).unlink()
    assert "is missing" in CliRunner().invoke(app, ["verify", str(folder), "--json"]).stdout


@pytest.mark.slow
def test_a_killed_rank_ends_the_run(files: Files) -> None:
    """The command line on two processes under torchrun, one of which is killed while it trains: soon no process is
    left, and one line says what happened."""
    import psutil

    options = files.run_options("killed-rank", layout="tp2-sp", steps=1000, async_save=True)
    path = files.root / "killed.yaml"
    path.write_text(TrainConfig.from_flags(**options).to_yaml())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "dlm_bridge.cli", "pretrain", "--config", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DLM_BRIDGE_PLATFORM": "cpu"}
    metrics = files.run("killed-rank") / "metrics.jsonl"
    with (files.root / "killed.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    for _ in range(20_000):
        if process.poll() is not None or (metrics.exists() and '{"step": 6,' in metrics.read_text()):
            break
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    try:
        ranks = {member.environ().get("RANK"): member for member in psutil.Process(process.pid).children()}
        ranks["1"].kill()
        _, left = psutil.wait_procs([psutil.Process(process.pid), *family], timeout=120)
        said = (files.root / "killed.txt").read_text()
        assert not left, said[-3000:]
    finally:
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.kill()
        process.wait()
    assert len(family) > 4  # ranks and the processes of their checkpoints
    assert "dlm_bridge/train" not in said  # in no traceback
    steps = [row["step"] for row in read_rows(metrics)]  # the last line may be torn
    assert 6 <= steps[-1] < 1000


def _train_with_accelerate(options: dict[str, Any]) -> list[dict[str, Any]]:
    from dlm_bridge.train.accelerate.trainer import train

    AcceleratorState._reset_state(reset_partial_state=True)
    train(TrainConfig.from_flags(**options), False, Console(quiet=True))
    return read_metrics(Path(options["output"]))


@pytest.mark.parametrize(("processes", "name"), [(number, name) for number in WORLDS for name in plan(number)])
def test_processes(processes: int, name: str, said: Said) -> None:
    assert_ok(name, said[processes], processes)
