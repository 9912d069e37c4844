"""`dlm-bridge plan`: the table, JSON, the figure, and bad input in one line."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from dlm_bridge import hub
from dlm_bridge.generation import batch_size
from dlm_bridge.generation.batch_size import plan_batch
from dlm_bridge.loading.pretrained import load_hub_model
from dlm_bridge.plan.command import PlanSettings
from dlm_bridge.plan.hardware import GPUS
from dlm_bridge.plan.inference import MOST_ROWS, USED_FRACTION
from tests.checkpoints import write_llada
from tests.convert.helpers import run_cli
from tests.families import sdar
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
        (("--gpus", 8, "--seq-length", 128, "--gpu", "H20O"), "--gpu: 'H20O' is unknown: the nearest is H200;"),
        (("--gpus", 8, "--seq-length", 128, "--lora-rank", 8, "--lora-targets", "q_projs"), "--lora-targets"),
        (("--gpus", 8, "--seq-length", 128, "--lora-targets", "o_proj"), "--lora-targets"),
        (("--gpus", 8, "--seq-length", 128, "--cpu-offload"), "--cpu-offload"),
        (("--gpus", 8, "--seq-length", 128, "--engine", "accelerate", "--cpu-offload"), "--cpu-offload"),
        (("--gpus", 8, "--seq-length", 128, "--engine", "accelerate", "--tp", 2), "--tp"),
        (("--gpus", 8, "--seq-length", 128, "--engine", "accelerate", "--recommend"), "--recommend"),
        (("--gpus", 8, "--seq-length", 128, "--gen-length", 16), "--gen-length"),
        (("--gpus", 8, "--seq-length", 128, "--inference", "--gen-length", 256), "--gen-length"),
        (("--gpus", 8, "--seq-length", 128, "--inference", "--pp", 2), "--pp"),
        (("--gpus", 8, "--seq-length", 128, "--inference", "--precision", "fp8"), "--precision"),
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


def table_of(out: str) -> list[list[str]]:
    """Cells of the memory table, its head first."""
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("stage layers"))
    last = next(number for number, line in enumerate(lines) if line.startswith("parameters by role"))
    return [line.split() for line in (lines[first], *lines[first + 2 : last])]


def test_no_number_is_cut_at_80_columns_and_picture_and_table_have_the_same_words(
    v3: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where no GPU is large enough."""
    monkeypatch.setenv("COLUMNS", "80")
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    layout = ("--gpus", 2, "--pp", 2, "--pipeline-split", "Et*30|t*31L")
    code, out, _ = run_cli(capsys, "plan", v3, *layout, "--seq-length", 4096, "--png", "plan.png")
    assert code == 1
    assert "--recommend" in out
    assert max(map(len, out.splitlines())) <= 80
    head, *stages = table_of(out)
    assert len(stages) == 2
    for cells in stages:
        sizes = [float(cell.replace(",", "")) for cell in cells[2:]]  # raises for a cut number
        assert sum(sizes[:-1]) == pytest.approx(sizes[-1], rel=2e-3)
    assert [label.get_text() for label in drawn[0].axes[0].get_xticklabels()] == head[2:]


def test_recommendation_where_nothing_fits_is_an_answer(v3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("plan", v3, "--gpus", 8, "--seq-length", 4096, "--global-batch-size", 8, "--recommend")
    code, out, err = run_cli(capsys, *run)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    code, out, err = run_cli(capsys, *run, "--json")
    assert code == 1
    assert json.loads(out)["fits"] is False


@pytest.mark.parametrize("name", ["GSAI-ML/LLaDA-8B-Instruct", "llada-8b-base"])
def test_published_models_need_no_hub(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asks the network"))
    code, out, _ = run_cli(capsys, "plan", name, "--gpus", 8, "--seq-length", 4096, "--gpu", "b200")
    assert code == 0
    assert "8,015,581,184 parameters" in out


def test_the_nearest_published_model_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_is_known", lambda _: False)
    for name in ("LLaDA2.0-flsh", "inclusionAI/LLaDA2.0-flsh"):
        code, _, err = run_cli(capsys, "plan", name, "--gpus", 8, "--seq-length", 4096)
        assert code == 2
        assert "inclusionAI/LLaDA2.0-flash" in err


def test_lora_needs_a_fraction_and_trains_the_adapter_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("plan", "LLaDA-8B-Base", "--gpus", 1, "--seq-length", 2048, "--json")
    code, out, _ = run_cli(capsys, *run)
    assert code == 1
    (whole,) = json.loads(out)["stages"]
    code, out, _ = run_cli(capsys, *run, "--lora-rank", 16)
    assert code == 0
    (adapted,) = json.loads(out)["stages"]
    # Rank times (input + output) of q, k, v, o, gate, up and down, in 32 layers.
    assert adapted["trained"] == 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 12288))
    assert adapted["gradients"] == 4 * adapted["trained"]
    assert adapted["optimizer"] == 12 * adapted["trained"]
    assert adapted["weights"] == whole["weights"] + 2 * adapted["trained"]
    assert whole["trained"] == whole["held"]


def test_offloaded_states_are_in_the_cpus_memory(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("plan", "LLaDA-8B-Base", "--gpus", 8, "--seq-length", 2048, "--json")

    def stage(*flags: object) -> dict[str, float]:
        _, out, _ = run_cli(capsys, *run, *flags)
        found: dict[str, float] = json.loads(out)["stages"][0]
        return found

    kept, moved = stage(), stage("--optimizer-cpu-offload")
    assert (moved["optimizer"], moved["host"]) == (0, kept["optimizer"])
    assert kept["host"] == 0
    fsdp = ("--engine", "accelerate", "--sharding", "fsdp")
    kept, moved = stage(*fsdp), stage(*fsdp, "--cpu-offload")
    assert moved["host"] == 16 * kept["held"] / 8
    assert moved["allocated"] == pytest.approx(kept["allocated"] - moved["host"], rel=1e-6)


def test_a_gpu_is_its_data_sheet_which_single_rates_override() -> None:
    assert PlanSettings(gpu="nvidia h200").hardware == GPUS["H200"]
    assert PlanSettings(gpu="a100_40gb").hardware.memory == 40e9
    found = PlanSettings(gpu="b200", gpu_memory="96GB", nvlink=100).hardware
    assert (found.memory, found.nvlink, found.flops) == (96e9, 100e9, 2250e12)


def test_sampling_as_the_engine_counts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row's bytes are those of `batch_size=auto`, for a sampler with and without a KV cache."""
    assert (USED_FRACTION, MOST_ROWS) == (batch_size.USED_FRACTION, batch_size.MOST_ROWS)
    sdar_folder = sdar.CASES[0].write(tmp_path / "sdar", mask_token_id=127, eos_token_id=1, pad_token_id=1)
    for folder, name in ((write_llada(tmp_path / "llada"), "llada"), (sdar_folder, "sdar")):
        model, _ = load_hub_model(folder, name, dtype=torch.bfloat16)
        wanted = plan_batch(model, [32], {"gen_length": 32}, diffusion=True, device=torch.device("meta"))
        run = ("plan", folder, "--gpus", 1, "--seq-length", 64, "--gen-length", 32, "--inference", "--json")
        code, out, _ = run_cli(capsys, *run)
        assert code == 0
        found = json.loads(out)
        assert (found["activations"], found["logits"]) == (wanted.activations, wanted.logits)
        assert (found["kv_cache"] > 0) == (wanted.cache > 0)
        assert found["weights"] == sum(weight.nbytes for weight in model.parameters())
        assert found["rows"] == MOST_ROWS  # of tiny models more would fit


def test_the_smallest_tensor_parallel_size_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("plan", "LLaDA2.0-flash", "--gpus", 8, "--seq-length", 4096, "--inference")
    code, out, _ = run_cli(capsys, *run, "--recommend", "--gpu", "H200", "--json")
    found = json.loads(out)
    assert (code, found["tp"], found["copies"], found["fits"]) == (0, 2, 4, True)
    assert found["rows"] > 1
    assert run_cli(capsys, *run, "--tp", 2)[0] == 1
    assert run_cli(capsys, *run, "--tp", 4, "--gpu-memory", "80GB")[0] == 0
