"""The Accelerate engine: the maths of a step, and what a run leaves behind."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaMLP

from dlm_bridge import Bridge, Layout
from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.models.families import FamilySpec, families, family_by_name
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.single_stream import MaskedDiffusion
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.schedule import learning_rate
from dlm_bridge.train.setup import model_source, with_objective
from tests import launcher
from tests.processes import environments
from tests.refusals import refused
from tests.train.conftest import Run, read_metrics, without_speed


def _weights(output: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(output / "checkpoints" / f"step-{step:07d}" / "model.safetensors")


def _close(left: list[dict[str, Any]], right: list[dict[str, Any]], rel: float) -> None:
    assert [row["step"] for row in left] == [row["step"] for row in right]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in left] == pytest.approx([row[key] for row in right], rel=rel)


@pytest.mark.draws
def test_loss_falls_and_the_folder_holds_what_it_should(tmp_path: Path, run: Run) -> None:
    rows = run(tmp_path / "run", steps=60, save_interval=25, keep_last=2, length_variation=0.0)
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert sum(row["loss"] for row in rows[-10:]) < 0.6 * 10 * rows[0]["loss"]
    assert set(rows[0]) == {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "tokens_per_s_per_device",
        "mfu",
        "peak_memory",
    }
    assert rows[0]["mfu"] is None
    assert rows[-1]["tokens"] == 60 * 8 * 16
    assert rows[-1]["eval_loss"] < 0.6 * rows[0]["loss"]
    output = tmp_path / "run"
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-0000050", "step-0000060"]
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((output / "config.yaml").read_text())["objective"]["objective"] == "masked"
    checkpoint = output / "checkpoints" / "step-0000060"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert json.loads((checkpoint / "config.json").read_text())["d_model"] == 32
    assert torch.equal(model.lm_head.weight, _weights(output, 60)["model.transformer.ff_out.weight"])
    assert AutoTokenizer.from_pretrained(checkpoint).mask_token_id == model.config.mask_token_id


def test_first_step_is_the_objective_at_the_initial_weights(
    tmp_path: Path, run: Run, seed_folder: Path, values: dict[str, Any]
) -> None:
    """Loss, gradient norm and AdamW's first update of step 1, computed here without the engine."""
    from dlm_bridge.data.blocks import Epochs, split
    from dlm_bridge.data.documents import find_files, pack

    rows = run(tmp_path / "run", steps=1, warmup_steps=0, lr_schedule="constant", clip_grad=0.0)
    raw = json.loads((seed_folder / "config.json").read_text())
    weights = dict(families()[0].initial_weights(raw, seed=0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-0000001")
    model.load_state_dict(type(model).from_pretrained(None, config=model.config, state_dict=weights).state_dict())
    tokenizer = AutoTokenizer.from_pretrained(seed_folder)
    train, _, _ = split(pack(find_files(values["data"]), tokenizer, 16, raw["mask_token_id"]), (0.99, 0.01, 0.0))
    objective = MaskedDiffusion(raw["mask_token_id"], length_variation=0.2)
    noisy = objective.noise(Epochs(train, seed=0).rows(range(8)).input_ids, Uniforms.keyed(0, 1, range(8), 16))
    logits = model(noisy.input_ids, attention_mask=noisy.model_mask()).logits[noisy.mask]
    loss = objective.loss_sum(logits, noisy) / noisy.normaliser
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert rows[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert rows[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    trained = _weights(tmp_path / "run", 1)
    # AdamW's first step moves each weight by lr x sign(gradient) after decay, except where the gradient is near zero.
    name = "model.transformer.blocks.0.attn_norm.weight"
    gradient = model.model.layers[0].input_layernorm.weight.grad
    expected = weights[name] - 1e-2 * gradient / (gradient.abs() + 1e-8)
    assert torch.allclose(trained[name], expected, atol=1e-5)  # a norm does not decay
    name = "model.transformer.blocks.0.q_proj.weight"
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    expected = weights[name] * (1 - 1e-2 * 0.1) - 1e-2 * gradient / (gradient.abs() + 1e-8)
    assert torch.allclose(trained[name], expected, atol=1e-4)


def test_accumulation_equals_one_big_batch(tmp_path: Path, run: Run) -> None:
    whole = run(tmp_path / "whole", steps=4)
    cut = run(tmp_path / "cut", steps=4, micro_batch_size=2)
    _close(cut, whole, rel=1e-5)
    for name, tensor in _weights(tmp_path / "whole", 4).items():
        assert torch.allclose(_weights(tmp_path / "cut", 4)[name], tensor, atol=2e-5), name


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_equal_one(torchrun: bool, tmp_path: Path, run: Run, values: dict[str, Any]) -> None:
    """Through the command line, under torchrun and forked with its variables, with gloo, and with accumulation."""
    one = run(tmp_path / "one", steps=4)
    options = {**values, "steps": 4, "micro_batch_size": 2, "output": str(tmp_path / "two")}
    (tmp_path / "run.yaml").write_text(TrainConfig.from_flags(**options).to_yaml())
    command = ["pretrain", "--config", str(tmp_path / "run.yaml")]
    if torchrun:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launch, "-m", "dlm_bridge.cli", *command], check=True, capture_output=True, timeout=300)
    else:
        logs = [tmp_path / f"log_{rank}.txt" for rank in range(2)]
        assert launcher.run("dlm_bridge.cli", command, environments(2), logs, 300), logs[0].read_text()
    two = read_metrics(tmp_path / "two")
    _close(two, one, rel=1e-5)
    assert two[-1]["eval_loss"] == pytest.approx(one[-1]["eval_loss"], rel=1e-4)
    for name, tensor in _weights(tmp_path / "one", 4).items():
        assert torch.allclose(_weights(tmp_path / "two", 4)[name], tensor, atol=2e-5), name


def test_gradient_checkpointing_recomputes_and_changes_nothing(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    forward = LlamaMLP.forward

    def counted(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", counted)
    plain = run(tmp_path / "plain", steps=3, eval_interval=0)
    assert calls == 3 * 2
    recomputed = run(tmp_path / "recomputed", steps=3, eval_interval=0, gradient_checkpointing=True)
    assert calls == 3 * 2 + 3 * 2 * 2
    _close(recomputed, plain, rel=1e-6)


def test_bf16_trains_close_to_fp32_and_keeps_fp32_weights(tmp_path: Path, run: Run) -> None:
    exact = run(tmp_path / "fp32", steps=6)
    rounded = run(tmp_path / "bf16", steps=6, precision="bf16")
    losses = [[row["loss"] for row in rows] for rows in (exact, rounded)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert {tensor.dtype for tensor in _weights(tmp_path / "bf16", 6).values()} == {torch.float32}


def test_learning_rates_follow_the_schedule(tmp_path: Path, run: Run, values: dict[str, Any]) -> None:
    rows = run(tmp_path / "run", steps=6, warmup_steps=2, lr=0.4e-2, min_lr=1e-3, save_interval=0)
    cosine = [1e-3 + 3e-3 * (1 + c) / 2 for c in (2**-0.5, 0.0, -(2**-0.5), -1.0)]
    assert [row["lr"] for row in rows] == pytest.approx([0.2e-2, 0.4e-2, *cosine])
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-0000006"]


@pytest.mark.parametrize(("name", "middle"), [("linear", 0.55), ("constant", 1.0), ("cosine", 0.55)])
def test_schedules(name: str, middle: float, values: dict[str, Any]) -> None:
    config = TrainConfig.from_flags(
        **{**values, "output": "x", "steps": 12, "lr": 1.0, "min_lr": 0.1, "lr_schedule": name}
    )
    assert learning_rate(config, 1) == 0.5
    assert learning_rate(config, 2) == 1.0
    assert learning_rate(config, 7) == pytest.approx(middle)
    assert learning_rate(config, 12) == pytest.approx(1.0 if name == "constant" else 0.1)


def test_starts_from_a_checkpoint_of_another_run(tmp_path: Path, run: Run) -> None:
    run(tmp_path / "first", steps=30, save_interval=0)
    start = tmp_path / "first/checkpoints/step-0000030"
    rows = run(tmp_path / "second", model=str(start), from_scratch=False, steps=2, lr=0.0)
    assert rows[0]["loss"] < 4.0 < read_metrics(tmp_path / "first")[0]["loss"]
    assert all(
        torch.equal(tensor, load_file(start / "model.safetensors")[name])
        for name, tensor in _weights(tmp_path / "second", 2).items()
    )


def test_starts_from_a_megatron_checkpoint(tmp_path: Path, run: Run, seed_folder: Path) -> None:
    run(tmp_path / "first", steps=1, save_interval=0)
    start = tmp_path / "first/checkpoints/step-0000001"
    Bridge.from_hf(start).to_megatron(tmp_path / "megatron", Layout(tp=2, pp=2))
    options = {"from_scratch": False, "steps": 2}
    rows = run(tmp_path / "hub", model=str(start), **options)
    assert without_speed(run(tmp_path / "sharded", model=str(tmp_path / "megatron"), **options)) == without_speed(rows)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (family_by_name("llada"), None),
        (dataclasses.replace(family_by_name("llada"), objective="other"), "'other'"),
        (dataclasses.replace(family_by_name("llada"), shift=True), "shifted"),
        (dataclasses.replace(family_by_name("llada"), attention_pattern="block_causal"), "block-causal"),
        (None, "^model: .*SimpleNamespace"),
    ],
)
def test_objective_must_be_the_one_that_the_model_is_read_with(
    values: dict[str, Any], family: FamilySpec | None, message: str | None
) -> None:
    model = SimpleNamespace(family=family, config=transformers.PretrainedConfig())
    config = TrainConfig.from_flags(**values, output="o")
    if message is None:
        assert with_objective(config, model).objective.objective == "masked"
    else:
        with pytest.raises(DlmBridgeError, match=message):
            with_objective(config, model)


def test_mock_data_needs_no_tokenizer(tmp_path: Path, run: Run, seed_folder: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((seed_folder / "config.json").read_bytes())
    rows = run(tmp_path / "run", model=str(bare), data=["mock"], steps=2)
    assert without_speed(rows) == without_speed(run(tmp_path / "again", model=str(bare), data=["mock"], steps=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp16"}, "^precision: fp16"),
        ({"model": "/nowhere"}, "/nowhere.*config.json"),
        ({"model": "/nowhere", "from_scratch": False}, "/nowhere"),
        ({"from_scratch": False}, "no weights.*from.scratch"),
        ({"data": ["/nowhere.txt"]}, "/nowhere.txt"),
        ({"tokenizer": "/nowhere"}, "^/nowhere: "),
        ({"seq_length": 65}, "^seq_length: 65 .* 64"),
        ({"objective": "next"}, "objective.*'next'"),
        ({"lr": 1e30, "clip_grad": 0.0, "warmup_steps": 0}, "^step .*`lr`"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, run: Run, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DlmBridgeError, match=message) as raised:
        run(tmp_path / "run", **changes)
    assert "\n" not in str(raised.value)


def test_an_output_folder_with_a_run_is_refused(tmp_path: Path, run: Run) -> None:
    rows = run(tmp_path / "run", steps=1)
    with refused(SettingError, "output", str(tmp_path / "run")):
        run(tmp_path / "run", steps=2)
    assert read_metrics(tmp_path / "run") == rows


def test_config_without_usable_ids_is_refused(tmp_path: Path, run: Run, seed_folder: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((seed_folder / "config.json").read_text())
    for token in (999, True):
        (folder / "config.json").write_text(json.dumps({**config, "mask_token_id": token}))
        with refused(SettingError, "mask_token_id", str(token), "288"):
            run(tmp_path / "run", model=str(folder), data=["mock"])
    (folder / "config.json").write_text(json.dumps({**config, "init_fn": "kaiming_normal"}))
    with pytest.raises(DlmBridgeError, match="'kaiming_normal'"):
        run(tmp_path / "run", model=str(folder), data=["mock"])


def test_weights_that_are_pickled(tmp_path: Path, run: Run, values: dict[str, Any]) -> None:
    """A folder with torch's own file alone is a model, as for every other command."""
    run(tmp_path / "run", steps=1)
    folder = tmp_path / "run" / "checkpoints" / "step-0000001"
    first = model_source(
        TrainConfig.from_flags(**{**values, "output": "o", "model": str(folder), "from_scratch": False})
    ).load()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    again = model_source(
        TrainConfig.from_flags(**{**values, "output": "o", "model": str(folder), "from_scratch": False})
    ).load()
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in first.state_dict().items())


@pytest.mark.parametrize("named", ["model", "tokenizer"])
def test_without_a_network_a_hub_id_is_one_line_at_once(
    named: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is tried again and again where the Hub's host is not known."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://nowhere.invalid")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    scratch = {"from_scratch": named != "model"}
    with pytest.raises(DlmBridgeError, match=r"me/it: .*nowhere\.invalid"):
        run(tmp_path / "run", steps=1, **{named: "me/it"}, **scratch)
    assert not [record for record in caplog.records if "Retrying" in record.getMessage()]
