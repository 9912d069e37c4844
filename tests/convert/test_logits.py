"""verify --logits: megatron-core's models against transformers', detected errors, and notes on skipped comparisons."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import write_llada
from tests.convert.helpers import run_cli

pytestmark = pytest.mark.extension("parallel")

MEGATRON, TRANSFORMERS = "megatron-core", "transformers"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """[exit code, stdout, stderr] of every case of the worker."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install 'dlm-bridge[megatron]'")
    folder = tmp_path_factory.mktemp("logits")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DLM_BRIDGE_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.convert.logits_worker", str(folder)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "report.json").read_text())


def verdict(said: dict[str, Any], case: str, code: int) -> dict[str, Any]:
    found, out, err = said[case]
    assert found == code, err + out
    return json.loads(out)


@pytest.mark.parametrize(
    ("case", "engines", "positions"),
    [
        ("alone", (MEGATRON, TRANSFORMERS), 32),
        ("pair", (TRANSFORMERS, MEGATRON), 32),
        ("padded", (TRANSFORMERS, MEGATRON), 32),
        ("blocks", (MEGATRON, TRANSFORMERS), 32),
        ("window", (MEGATRON, TRANSFORMERS), 48),
        ("yarn", (MEGATRON, TRANSFORMERS), 56),
    ],
)
def test_megatron_core_computes_the_same(
    said: dict[str, Any], case: str, engines: tuple[str, str], positions: int
) -> None:
    """Bidirectional, block-causal, and beyond a window and the original context."""
    logits = verdict(said, case, 0)["logits"]
    assert (logits["a"], logits["b"]) == engines
    assert logits["positions"] == positions
    assert logits["difference"] <= 1e-5
    assert logits["largest"] > 1
    assert logits["notes"] == []


def test_swapped_gate_and_up_are_caught(said: dict[str, Any]) -> None:
    found = verdict(said, "swapped", 1)
    assert found["logits"]["difference"] > 1e-2
    assert found["logits"]["b"] == MEGATRON
    assert {item["name"] for item in found["differences"]} > {"logits"}


def test_a_wrong_setting_is_caught_where_every_tensor_is_equal(said: dict[str, Any]) -> None:
    found = verdict(said, "wrong-setting", 1)
    assert [(item["name"], item["kind"]) for item in found["differences"]] == [("logits", "values")]
    assert found["logits"]["difference"] > 1e-2
    assert found["equal"] is False


def test_a_missing_tensor_leaves_no_logits(said: dict[str, Any]) -> None:
    found = verdict(said, "cut", 1)
    assert found["logits"] is None
    kinds = {item["name"]: item["kind"] for item in found["differences"]}
    assert kinds == {"model.transformer.ln_f.weight": "missing", "logits": "unreadable"}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("missing", "dlm-bridge[megatron]"),
        ("refused", "sliding window"),
    ],
)
def test_what_megatron_core_cannot_compute_is_said(said: dict[str, Any], case: str, reason: str) -> None:
    logits = verdict(said, case, 0)["logits"]
    assert (logits["a"], logits["b"]) == (TRANSFORMERS, TRANSFORMERS)
    (note,) = logits["notes"]
    assert "_megatron: " in note or "/megatron: " in note
    assert reason in note
    code, out, err = said[f"{case}-alone"]  # transformers alone would be compared with itself
    assert (code, out) == (2, "")
    assert reason in err


def test_people_read_the_same(said: dict[str, Any]) -> None:
    code, out, _ = said["shown"]
    assert code == 0
    assert "logits from megatron-core and transformers" in out
    assert "32 positions" in out
    code, out, _ = said["missing-shown"]
    assert code == 0
    assert out.startswith("note: ")
    assert "dlm-bridge[megatron]" in out
    assert "logits from transformers are identical" in out


def test_a_window_too_long_to_pass_is_said(said: dict[str, Any]) -> None:
    logits = verdict(said, "too-long", 0)["logits"]
    assert logits["positions"] == 32
    (note,) = logits["notes"]
    assert "1,048,576" in note


def test_nothing_of_megatron_core_is_left_behind(said: dict[str, Any]) -> None:
    assert said["left"] is True


def test_two_hub_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = write_llada(tmp_path / "hub", shards=1, n_kv_heads=2)
    other = write_llada(tmp_path / "other", shards=1, n_kv_heads=2)
    code, out, _ = run_cli(capsys, "verify", hub, other, "--logits", "--json")
    assert code == 0
    assert json.loads(out)["logits"]["difference"] == 0
    tensors = load_file(other / "model.safetensors")
    name = "model.transformer.blocks.0.attn_out.weight"
    save_file(tensors | {name: tensors[name].T.contiguous()}, other / "model.safetensors", metadata={"format": "pt"})
    code, out, _ = run_cli(capsys, "verify", hub, other, "--logits", "--json")
    assert code == 1
    logits = json.loads(out)["logits"]
    assert (logits["a"], logits["b"]) == (TRANSFORMERS, TRANSFORMERS)
    assert logits["difference"] > 1e-3
    save_file(tensors | {name: torch.full_like(tensors[name], torch.nan)}, other / "model.safetensors")
    code, out, _ = run_cli(capsys, "verify", hub, other, "--logits", "--json")
    assert code == 1
    assert json.loads(out)["differences"][-1]["detail"].startswith(f"{other}: ")
    write_llada(other, shards=1, n_kv_heads=2, vocab_size=120, embedding_size=120)
    code, out, _ = run_cli(capsys, "verify", hub, other, "--logits", "--json")
    assert code == 1
    detail = json.loads(out)["differences"][-1]["detail"]
    assert all(named in detail for named in (str(hub), "128", str(other), "120"))
    code, out, err = run_cli(capsys, "verify", hub, "--logits")
    assert (code, out) == (2, "")
    assert str(hub) in err
