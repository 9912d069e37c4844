"""`dlm-bridge plan`: the table, JSON, the figure, and bad input in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.checkpoints import write_llada
from tests.convert.helpers import run_cli
from tests.plan import configs


@pytest.fixture
def v3(tmp_path: Path) -> Path:
    """A folder that holds nothing but DeepSeek-V3's config.json."""
    (tmp_path / "config.json").write_text(json.dumps(configs.DEEPSEEK_V3))
    return tmp_path


LAYOUT = (
    *("--gpus", 1024, "--seq-length", 4096, "--tp", 2, "--pp", 8, "--ep", 64, "--etp", 1),
    *("--pipeline-split", "Et|(tt|)*30L", "--global-batch-size", 8192, "--gradients", "bf16"),
)


def test_plans_a_config_alone(v3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(
        capsys, "plan", v3, *LAYOUT, "--recompute", "selective", "--recompute-modules", "mla_up_proj,mlp"
    )
    assert code == 0
    assert "671,026,419,200 parameters" in out
    assert "expert DP 2" in out
    assert "fits 74.5 GiB" in out


def test_json_and_exit_code_where_it_does_not_fit(v3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = v3 / "plan.png"
    code, out, _ = run_cli(capsys, "plan", v3, *LAYOUT, "--gpu-memory", "40GB", "--json", "--png", png)
    found = json.loads(out)
    assert code == 1
    assert found["fits"] is False
    assert found["peak_bytes"] > 40e9
    assert len(found["stages"]) == 8
    assert sum(len(chunk) for stage in found["stages"] for chunk in stage["chunks"]) == 61
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_small_model_has_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In MiB and KiB, on colours that differ."""
    write_llada(tmp_path)
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    code, out, _ = run_cli(capsys, "plan", tmp_path, "--gpus", 2, "--pp", 2, "--seq-length", 64, "--png", "plan.png")
    assert code == 0
    assert "Memory per GPU in MiB (1 GPU per pipeline stage)" in out
    assert re.search(r"stage \d needs [\d.]+ GiB \([\d.]+ MiB allocated\)", out)
    axes = drawn[0].axes[0]
    fields = [text.get_text() for text in axes.texts]
    assert {field.split()[-1] for field in fields} >= {"KiB", "MiB"}
    assert axes.images[0].get_clim()[1] < 2
    assert "0.156 M parameters" in axes.get_title()


def test_recommends_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.LLAMA_3_8B))
    run = ("plan", tmp_path, "--gpus", 8, "--seq-length", 8192, "--global-batch-size", 64, "--recommend")
    code, out, _ = run_cli(capsys, *run)
    assert code == 0
    assert "recommended of" in out
    assert "tensor parallelism" in out
    assert "given" not in out
    code, out, _ = run_cli(capsys, *run, "--tp", 8, "--json")
    found = json.loads(out)["recommendation"]
    assert any("given -> recommended: tensor parallelism 8 ->" in line for line in found["comparison"])
    assert found["given"]["run"]["tp"] == 8
    assert found["recommended"]["step_seconds"]["total"] < found["given"]["step_seconds"]["total"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", 8, "--seq-length", 128, "--tp", 3), "--tp"),
        (("--gpus", 8, "--seq-length", 128, "--gpu-memory", "lots"), "--gpu-memory"),
        (("--gpus", 8, "--seq-length", 128, "--network", 0), "--network"),
        (("--gpus", 8, "--seq-length", 128, "--png", "/nowhere/x.png"), "--png: /nowhere/x.png"),
        (("--gpus", 8, "--seq-length", 128, "--gradients", "fp8"), "--gradients"),
    ],
)
def test_bad_input_is_one_line(
    v3: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], said: str
) -> None:
    code, out, err = run_cli(capsys, "plan", v3, *arguments)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_model_that_megatron_cannot_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**configs.LLADA_MOE, "architectures": ["OlmoeForCausalLM"], "intermediate_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = run_cli(capsys, "plan", tmp_path, "--gpus", 8, "--seq-length", 128)
    assert code == 2
    assert "OLMoE normalises" in err
