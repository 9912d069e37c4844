"""Checkpoints, adapters and runs that an earlier version wrote (data/README.md) are read as that version read them."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import dlm_bridge  # noqa: F401  registers the families
from dlm_bridge.cli.app import app
from tests import launcher
from tests.convert.helpers import common_state, dcp_tensors
from tests.processes import environments

DATA = Path(__file__).parent / "data"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())
MEGATRON = {"llada_torch_dist": "llada", "llada_torch": "llada", "sdar_moe_torch_dist": "sdar_moe"}
STEPS = "--data mock --global-batch-size 4 --seq-length 16 --lr 0.01 --eval-interval 0 --save-interval 2 --steps 4"
# A run, the flags that it was started with, the processes to resume it on and the tolerance of what follows.
NEWER = "megatron_mcore_0_19"
RESUMES = [
    ("accelerate", "--engine accelerate --precision fp32", 1, 1e-5),
    ("megatron", "--engine megatron --precision fp32", 1, 1e-5),
    ("megatron_bf16_tp2", "--engine megatron --precision bf16 --tp 2", 2, 1e-4),
    ("megatron_bf16_tp2", "--engine megatron --precision bf16", 1, 1e-2),
]


def command(*words: str | Path) -> None:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, f"{result.output}{result.exception!r}"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_weights(ours: Path, theirs: Path) -> None:
    found, wanted = weights(ours), weights(theirs)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", EXPECTED["generate"])
def test_a_hub_folder_generates_the_same_tokens(name: str) -> None:
    expected = EXPECTED["generate"][name]
    model = AutoModelForCausalLM.from_pretrained(DATA / name, dtype=torch.float32).eval()
    output = model.generate(torch.tensor([expected["prompt"]]), **expected["options"])
    assert output[0].tolist() == expected["tokens"]
    with torch.no_grad():
        logits = model(torch.arange(12)[None]).logits[0, -1]
    assert logits[: len(expected["logits"])].tolist() == pytest.approx(expected["logits"], abs=1e-4)


@pytest.mark.parametrize("name", MEGATRON)
def test_a_megatron_checkpoint_is_exported_bit_for_bit(name: str, tmp_path: Path) -> None:
    source = DATA / MEGATRON[name]
    command("export", DATA / name, tmp_path / "hub")
    assert_same_weights(tmp_path / "hub", source)
    exported, original = files(tmp_path / "hub"), files(source)
    assert exported.keys() - original.keys() == {"dlm_bridge.json"}
    for name, content in original.items():
        assert exported[name] == content, name


@pytest.mark.parametrize("name", MEGATRON)
def test_a_megatron_checkpoint_is_verified_and_resharded(name: str, tmp_path: Path) -> None:
    command("verify", DATA / name)
    command("verify", DATA / name, DATA / MEGATRON[name])
    command("inspect", DATA / name)
    command("reshard", DATA / name, tmp_path / "resharded", "--tp", "1", "--pp", "1")
    command("verify", tmp_path / "resharded", DATA / MEGATRON[name])


def test_a_hub_folder_is_imported_to_the_same_tensors(tmp_path: Path) -> None:
    command("import", DATA / "llada", tmp_path / "megatron", "--tp", "2", "--pp", "2")
    command("verify", tmp_path / "megatron", DATA / "llada_torch_dist")


def test_an_adapter_is_converted_both_ways(tmp_path: Path) -> None:
    base = ("--base", DATA / "sdar")
    command("adapter", "export", DATA / "sdar_lora_megatron", tmp_path / "exported", *base)
    assert_same_weights(tmp_path / "exported", DATA / "sdar_lora")
    command("adapter", "import", DATA / "sdar_lora", tmp_path / "imported", *base)
    command("adapter", "export", tmp_path / "imported", tmp_path / "again", *base)
    assert_same_weights(tmp_path / "again", DATA / "sdar_lora")


@pytest.mark.parametrize("run", [*(run for run, *_ in RESUMES[:3]), NEWER])
def test_a_trained_checkpoint_is_exported(run: str, tmp_path: Path) -> None:
    checkpoints = DATA / f"run_{run}" / "checkpoints"
    if run == "accelerate":
        command("import", checkpoints / "step-0000002", tmp_path / "megatron")
        command("export", tmp_path / "megatron", tmp_path / "hub")
        assert_same_weights(tmp_path / "hub", checkpoints / "step-0000002")
    else:
        command("export", checkpoints, tmp_path / "hub")
        trained = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float32)
        assert all(torch.isfinite(parameter).all() for parameter in trained.parameters())


@pytest.mark.parametrize(
    ("run", "flags", "processes", "tolerance"),
    [pytest.param(*one, marks=[pytest.mark.extension("parallel")] * ("megatron" in one[0])) for one in RESUMES],
)
@pytest.mark.fast("megatron_bf16_tp2*--tp 2*", "accelerate*")
def test_a_run_goes_on_as_it_would_have(
    run: str, flags: str, processes: int, tolerance: float, tmp_path: Path
) -> None:
    if run != "accelerate":
        pytest.importorskip("megatron.core")
    logs = [tmp_path / f"log_{rank}.txt" for rank in range(processes)]
    assert resumed(run, flags, tmp_path, logs), logs[0].read_text()
    assert_trained(tmp_path, EXPECTED["train"][run], tolerance)


def resumed(run: str, flags: str, tmp_path: Path, logs: list[Path]) -> bool:
    """Resume a copy of a run in a process for each of the logs: whether all ended well."""
    output = tmp_path / "run"
    shutil.copytree(DATA / f"run_{run}", output)
    (output / "config.yaml").unlink(missing_ok=True)  # its form may change; every option is given
    words = f"pretrain --model {DATA / 'llada'} --output {output} {STEPS} {flags} --resume"
    return launcher.run("dlm_bridge.cli", words.split(), environments(len(logs)), logs, 300)


def assert_trained(tmp_path: Path, rows: list[dict[str, float]], tolerance: float) -> None:
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    for row, expected in zip(found[2:], rows, strict=True):
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=tolerance)


@pytest.mark.extension("parallel")
def test_a_run_of_megatron_core_0_19_goes_on_or_is_refused_by_0_16(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    log = tmp_path / "log.txt"
    well = resumed(NEWER, "--engine megatron --precision fp32", tmp_path, [log])
    if version("megatron-core").startswith("0.16."):
        (line,) = [line for line in log.read_text().splitlines() if line.startswith("dlm-bridge: ")]
        assert not well
        assert str(tmp_path / "run" / "checkpoints" / "iter_0000002") in line
        assert "0.19" in line
        assert "Traceback" not in log.read_text()
        command("export", tmp_path / "run", tmp_path / "hub")  # the remedy
    else:
        assert well, log.read_text()
        assert_trained(tmp_path, EXPECTED["train"]["megatron"], 1e-5)


@pytest.mark.parametrize("form", ["0.16", "0.19"])
def test_a_run_of_megatron_core_0_19_is_resharded_with_its_optimizer_state(form: str, tmp_path: Path) -> None:
    run = DATA / f"run_{NEWER}" / "checkpoints"
    command("inspect", run)
    command("verify", run)
    command("reshard", run, tmp_path / "m", "--tp", "2", "--pp", "2", "--mcore", form)
    command("verify", tmp_path / "m")
    command("verify", tmp_path / "m", run)
    assert common_state(tmp_path / "m" / "iter_0000002") == common_state(run / "iter_0000002")
    ours, theirs = (dcp_tensors(root / "iter_0000002") for root in (tmp_path / "m", run))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
