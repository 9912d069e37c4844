"""A training run's folder stands for its newest whole checkpoint in every command that opens a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dlm_bridge.errors import CheckpointError, DlmBridgeError
from dlm_bridge.hub import checkpoint_folder
from dlm_bridge.loading import load_model
from dlm_bridge.parallel.train.checkpoints import find_iteration
from dlm_bridge.train.config.files import load_config
from tests.convert.helpers import run_cli
from tests.refusals import refused

DATA = Path(__file__).parent.parent / "compatibility/data"
NEWEST = {"accelerate": "step-0000004", "megatron": ""}
MODEL = json.loads((DATA / "run_megatron/checkpoints/dlm_bridge.json").read_text())["source"]["name"]


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    """A run of each engine, and one of an adapter. Those of the Accelerate engine have an older checkpoint that is
    empty, and a newer one without weights."""
    found = {name: tmp_path / name for name in ("accelerate", "megatron", "adapter")}
    shutil.copytree(DATA / "run_megatron", found["megatron"])
    for name, source in (
        ("accelerate", DATA / "run_accelerate/checkpoints/step-0000002"),
        ("adapter", DATA / "sdar_lora"),
    ):
        checkpoints = found[name] / "checkpoints"
        shutil.copytree(source, checkpoints / "step-0000004")
        (checkpoints / "step-0000002").mkdir()
        (checkpoints / "step-0000006").mkdir()
        shutil.copy(next(source.glob("*config.json")), checkpoints / "step-0000006")
        (found[name] / "config.yaml").write_text("task: pretrain\n")
    config = found["adapter"] / "checkpoints/step-0000004/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(DATA / "sdar")}))
    return found


def taken(run: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line names the checkpoint that was taken."""
    lines = [record.getMessage() for record in caplog.records if record.name == "dlm_bridge.hub"]
    assert len(lines) == 1, lines
    assert lines[0].endswith(f" of {run}: {Path('checkpoints', name)}")
    assert "'" not in lines[0]
    caplog.clear()


@pytest.mark.parametrize("engine", NEWEST)
def test_conversion_takes_the_newest_checkpoint(
    runs: dict[str, Path], engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    run, newest = runs[engine], runs[engine] / "checkpoints" / NEWEST[engine]
    action = ("import", "--tp", 2) if engine == "accelerate" else ("export",)
    for command in (("inspect", run), (action[0], run, tmp_path / "out", *action[1:])):
        code, _, err = run_cli(capsys, *command)
        assert code == 0, err
        taken(run, NEWEST[engine], caplog)
    source = json.loads((tmp_path / "out/dlm_bridge.json").read_text())["source"]["name"]
    assert source == (str(newest) if engine == "accelerate" else MODEL)
    code, _, err = run_cli(capsys, "verify", tmp_path / "out", run)
    assert code == 0, err
    taken(run, NEWEST[engine], caplog)
    assert run_cli(capsys, "verify", newest, run)[0] == 0


def test_what_cannot_be_converted_so_is_named(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, kind, words in (
        ("import", "megatron", "is a Megatron checkpoint already"),
        ("export", "accelerate", "is in the Hub's layout already"),
        ("import", "adapter", "dlm-bridge adapter"),
    ):
        code, _, err = run_cli(capsys, command, runs[kind], tmp_path / "out")
        assert (code, words in err) == (2, True), err


def test_models_are_loaded_from_runs(runs: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    from peft import PeftModel

    for engine, newest in NEWEST.items():
        loaded = load_model(runs[engine])
        taken(runs[engine], newest, caplog)
        assert loaded.family == "llada"
    assert isinstance(load_model(runs["adapter"]).model, PeftModel)
    taken(runs["adapter"], "step-0000004", caplog)


def test_an_adapter_of_the_megatron_engine_is_loaded_on_its_run_s_base(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which need not be what its Megatron checkpoint was converted from."""
    from peft import PeftModel

    peft, run = runs["adapter"] / "checkpoints/step-0000004", tmp_path / "run"
    assert run_cli(capsys, "import", DATA / "sdar", tmp_path / "base")[0] == 0
    code, _, err = run_cli(capsys, "adapter", "import", peft, run / "checkpoints", "--base", tmp_path / "base")
    assert code == 0, err
    (run / "config.yaml").write_text(f"task: pretrain\nmodel: {{path: {tmp_path / 'base'}}}\n")
    wanted = load_model(runs["adapter"]).model.state_dict()
    loaded = load_model(run).model
    assert isinstance(loaded, PeftModel)
    assert loaded.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())
    (run / "config.yaml").unlink()  # of an adapter that was converted
    assert isinstance(load_model(run / "checkpoints").model, PeftModel)
    assert run_cli(capsys, "adapter", "export", run / "checkpoints", tmp_path / "merged", "--merge")[0] == 0
    (run / "config.yaml").write_text("model: {model: ./gone}\n")
    with refused(CheckpointError, None, "gone: no such folder"):
        load_model(run)
    assert isinstance(load_model(run, like=str(DATA / "sdar")).model, PeftModel)


def test_training_starts_from_a_run(runs: dict[str, Path]) -> None:
    flags = {"data": ["mock"], "output": "x", "lora_rank": 0, "steps": 1}
    config = load_config({**flags, "model": str(runs["accelerate"]), "adapter": str(runs["adapter"])})
    assert config.model.model == str(runs["accelerate"] / "checkpoints/step-0000004")
    assert config.model.adapter == str(runs["adapter"] / "checkpoints/step-0000004")
    assert load_config({**flags, "model": "./nowhere"}).model.model == "./nowhere"


@pytest.mark.parametrize("file", ["latest_checkpointed_iteration.txt", "dlm_bridge.json"])
def test_a_run_whose_files_give_an_error_when_read_is_refused(runs: dict[str, Path], file: str) -> None:
    damaged = runs["megatron"] / "checkpoints" / file
    damaged.unlink()
    damaged.symlink_to("/proc/self/mem")
    with pytest.raises(DlmBridgeError, match=file):
        load_model(runs["megatron"])
    if file == "dlm_bridge.json":
        with pytest.raises(DlmBridgeError, match=file):
            find_iteration(runs["megatron"])
    else:  # what the tracker names is looked for in the folder, as where it is damaged
        assert find_iteration(runs["megatron"]).step == 2


def test_a_run_without_a_whole_checkpoint_is_refused(runs: dict[str, Path]) -> None:
    shutil.rmtree(runs["accelerate"] / "checkpoints/step-0000004")
    with refused(CheckpointError, runs["accelerate"]):
        checkpoint_folder(runs["accelerate"])
    assert checkpoint_folder(DATA / "llada") == DATA / "llada"
