"""LoRA through the engine: what is trained, PEFT's folder, merging, going on, quantized bases, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dlm_bridge.errors import CheckpointError, DlmBridgeError, SettingError
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.lora import BASE, with_lora
from dlm_bridge.train.setup import model_source, with_objective
from tests.autoregressive.cases import CASES as AUTOREGRESSIVE
from tests.convert.adapters import back, set_config, to_megatron
from tests.convert.helpers import hub_tensors, run_cli, same
from tests.data.chats import chatty, conversation, write_rows
from tests.families import llada2_moe, sdar_moe
from tests.refusals import hide, refused
from tests.train.conftest import Run, without_speed

OPTIONS: dict[str, Any] = {
    "task": "sft",
    "from_scratch": False,
    "length_variation": 0.0,
    "warmup_steps": 0,
    "lr_schedule": "constant",
    "lr": 1e-2,
    "seq_length": 64,
    "global_batch_size": 4,
    "save_interval": 0,
    "eval_interval": 0,
    "lora_rank": 4,
}
LINEAR = 2 * 7  # in the two layers of the base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, seed_folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A LLaDA with weights and a chat template."""
    folder = tmp_path_factory.mktemp("base") / "llada"
    model_source(
        TrainConfig.from_flags(model=str(seed_folder), data=["mock"], output="o", from_scratch=True)
    ).load().save_pretrained(folder)
    chatty(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def tune(run: Run, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    chats = write_rows(tmp_path_factory.mktemp("chats") / "chats.jsonl", [conversation(4 * i) for i in range(12)])

    def _tune(output: Path, resume: bool = False, **changes: Any) -> list[dict[str, Any]]:
        return run(output, resume, **{**OPTIONS, "model": str(base), "data": [str(chats)], **changes})

    return _tune


def _checkpoint(output: Path, step: int) -> Path:
    return output / f"checkpoints/step-{step:07d}"


def _adapter(output: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(_checkpoint(output, step) / "adapter_model.safetensors")


def test_an_adapter_is_trained_saved_merged_and_carried_over(
    tmp_path: Path, tune: Any, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    before = hub_tensors(base)
    rows = tune(tmp_path / "run", steps=6, save_interval=2, keep_last=2)
    assert rows[-1]["loss"] < rows[0]["loss"]
    output = tmp_path / "run"
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-0000004", "step-0000006"]
    settings = json.loads((_checkpoint(output, 6) / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8, "LORA")
    assert settings["base_model_name_or_path"] == str(base)
    assert len({file.stat().st_mode for file in output.rglob("*") if file.is_file()}) == 1  # none is private
    card = (_checkpoint(output, 6) / "README.md").read_text()
    assert "import dlm_bridge" in card
    assert "More Information Needed" not in card  # as in PEFT's own
    assert not list(_checkpoint(output, 6).glob("model*.safetensors"))
    assert all(same(tensor, before[name]) for name, tensor in hub_tensors(base).items())
    earlier, adapter = _adapter(output, 4), _adapter(output, 6)
    assert len(adapter) == 2 * LINEAR
    assert all(not torch.equal(tensor, earlier[name]) for name, tensor in adapter.items())

    ids = torch.randint(0, 280, (2, 20), generator=torch.Generator().manual_seed(0))
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), _checkpoint(output, 6)).eval()
    assert model.generate(ids[:, :4], max_new_tokens=8, steps=8, block_length=8).shape[1] > 4
    assert run_cli(capsys, "adapter", "export", output, tmp_path / "merged", "--merge")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=1e-4)
        assert (plain(ids).logits - expected).abs().max() > 1e-2
    changed = {name for name, tensor in hub_tensors(tmp_path / "merged").items() if not same(tensor, before[name])}
    assert len(changed) == LINEAR

    back(base, to_megatron(base, _checkpoint(output, 6), tmp_path / "megatron"), tmp_path / "back")
    returned = load_file(tmp_path / "back/adapter_model.safetensors")
    assert returned.keys() == adapter.keys()
    assert all(torch.equal(returned[name], tensor) for name, tensor in adapter.items())


@pytest.mark.slow
def test_dora(tmp_path: Path, tune: Any, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resume changes nothing; PEFT loads what is saved; merged, and by way of Megatron's layout, it is the same."""
    from peft import PeftModel

    rows = tune(tmp_path / "run", steps=4, save_interval=2, lora_dora=True)
    full = tune(tmp_path / "full", steps=1, lora_rank=0)
    assert rows[0]["loss"] == pytest.approx(full[0]["loss"], rel=1e-5)
    tune(tmp_path / "resumed", steps=2, lora_dora=True)
    assert without_speed(tune(tmp_path / "resumed", resume=True, steps=4, lora_dora=True)) == without_speed(rows)
    earlier, adapter = _adapter(tmp_path / "run", 2), _adapter(tmp_path / "run", 4)
    magnitudes = [name for name in adapter if name.endswith("lora_magnitude_vector")]
    assert (len(adapter), len(magnitudes)) == (3 * LINEAR, LINEAR)
    assert all(not torch.equal(adapter[name], earlier[name]) for name in magnitudes)
    back(base, to_megatron(base, _checkpoint(tmp_path / "run", 4), tmp_path / "megatron"), tmp_path / "back")
    returned = load_file(tmp_path / "back/adapter_model.safetensors")
    assert returned.keys() == adapter.keys()
    assert all(torch.equal(returned[name], tensor) for name, tensor in adapter.items())

    ids = torch.randint(0, 280, (2, 20), generator=torch.Generator().manual_seed(0))
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    assert run_cli(capsys, "adapter", "export", tmp_path / "run", tmp_path / "merged", "--merge")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        before = plain(ids).logits
        expected = PeftModel.from_pretrained(plain, tmp_path / "back").eval()(ids).logits
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert (before - expected).abs().max() > 1e-2


def test_the_first_loss_is_the_bases_and_a_resume_changes_nothing(tmp_path: Path, tune: Any) -> None:
    whole = tune(tmp_path / "whole", steps=4, lora_dropout=0.1, save_interval=2)
    full = tune(tmp_path / "full", steps=1, lora_rank=0)
    assert whole[0]["loss"] == pytest.approx(full[0]["loss"], rel=1e-5)
    tune(tmp_path / "resumed", steps=2, lora_dropout=0.1)
    resumed = tune(tmp_path / "resumed", resume=True, steps=4, lora_dropout=0.1)
    assert without_speed(resumed) == without_speed(whole)
    ours, theirs = _adapter(tmp_path / "resumed", 4), _adapter(tmp_path / "whole", 4)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    cut = tune(tmp_path / "cut", steps=2, micro_batch_size=1)
    plain = tune(tmp_path / "plain", steps=2)
    assert [row["loss"] for row in cut] == pytest.approx([row["loss"] for row in plain], rel=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"lora_dora": True}, pytest.param({"lora_dora": True, "sharding": "fsdp"}, marks=pytest.mark.slow)]
)
def test_half_precision_holds_the_base_in_it_and_the_adapter_in_fp32(
    changes: dict[str, Any], tmp_path: Path, tune: Any
) -> None:
    exact = tune(tmp_path / "fp32", steps=3, **changes)
    rounded = tune(tmp_path / "bf16", steps=3, precision="bf16", **changes)
    assert [row["loss"] for row in rounded] == pytest.approx([row["loss"] for row in exact], rel=0.05)
    assert {tensor.dtype for tensor in _adapter(tmp_path / "bf16", 3).values()} == {torch.float32}


def test_an_adapter_goes_on_and_only_on_its_own_base(
    tmp_path: Path, tune: Any, base: Path, seed_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tune(tmp_path / "first", steps=2)
    start = _checkpoint(tmp_path / "first", 2)
    going_on = {"lora_rank": 0, "adapter": str(start), "steps": 1}
    tune(tmp_path / "second", **going_on, lr=0.0)
    assert all(
        torch.equal(tensor, _adapter(tmp_path / "first", 2)[name])
        for name, tensor in _adapter(tmp_path / "second", 1).items()
    )
    other = tmp_path / "other"
    config = TrainConfig.from_flags(model=str(seed_folder), data=["mock"], output="o", from_scratch=True, seed=7)
    model_source(config).load().save_pretrained(other)
    with refused(CheckpointError, start, str(base), str(other)):
        tune(tmp_path / "third", **going_on, model=str(other), tokenizer=str(base))
    (start / BASE).unlink()
    smaller = json.loads((base / "config.json").read_text()) | {"mlp_hidden_size": 40}
    (tmp_path / "smaller").mkdir()
    (tmp_path / "smaller/config.json").write_text(json.dumps(smaller))
    config = TrainConfig.from_flags(model=str(tmp_path / "smaller"), data=["mock"], output="o", from_scratch=True)
    model_source(config).load().save_pretrained(tmp_path / "weights")
    with pytest.raises(DlmBridgeError, match=r"is not an adapter of .*weights: .*size mismatch"):
        tune(tmp_path / "fourth", **going_on, model=str(tmp_path / "weights"), tokenizer=str(base))
    set_config(start, base_model_name_or_path="owner/base")
    resolved = with_objective(
        TrainConfig.from_flags(**{**OPTIONS, **going_on, "model": "owner/other", "data": ["d"], "output": "o"}),
        model_source(config).load(),
    )
    with pytest.raises(DlmBridgeError, match=r"owner/base.* owner/other"):
        with_lora(resolved, model_source(config).load())
    caplog.clear()
    with_lora(resolved.replace(model=str(base)), model_source(config).load())  # which may be a copy of owner/base
    (said,) = [record.getMessage() for record in caplog.records]
    assert "owner/base" in said
    assert str(base) in said


@pytest.mark.parametrize(("bits", "dora"), [("4bit", False), ("8bit", False), ("4bit", True)])
@pytest.mark.fast("4bit-True", "8bit-False")
def test_a_quantized_base(
    bits: str, dora: bool, tmp_path: Path, tune: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    exact = tune(tmp_path / "exact", steps=2)
    rows = tune(tmp_path / "run", steps=2, lora_quantize=bits, precision="bf16", lora_dora=dora)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in exact], rel=0.1)
    assert len(_adapter(tmp_path / "run", 2)) == (3 if dora else 2) * LINEAR
    assert run_cli(capsys, "adapter", "export", tmp_path / "run", tmp_path / "merged", "--merge")[0] == 0


def test_an_autoregressive_model(tmp_path: Path, tune: Any, base: Path) -> None:
    case = AUTOREGRESSIVE[0]
    (tmp_path / "body").mkdir()
    config = {**case.config, "vocab_size": 288, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 256}
    (tmp_path / "body/config.json").write_text(json.dumps(config))
    model = model_source(
        TrainConfig.from_flags(model=str(tmp_path / "body"), data=["mock"], output="o", from_scratch=True)
    ).load()
    model.save_pretrained(tmp_path / "model")
    rows = tune(tmp_path / "run", steps=4, model=str(tmp_path / "model"), tokenizer=str(base), packing=True)
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize(
    ("case", "targets", "found", "wrong"),
    [
        (llada2_moe.CASE, "query_key_value,o_proj", 2 * 4, ("q_proj", "no such linear layer")),
        (sdar_moe.CASE, "q_proj,v_proj", 2 * 4, ("gate_proj", "the experts' weights are one stack")),
    ],
    ids=["fused", "experts"],
)
def test_targets_of_families(
    case: Any, targets: str, found: int, wrong: tuple[str, str], tmp_path: Path, run: Run
) -> None:
    options = {**OPTIONS, "task": "pretrain", "model": str(case.write(tmp_path / "model")), "data": ["mock"]}
    options |= {"mask_token_id": 99, "steps": 1, "seq_length": case.length}
    run(tmp_path / "run", **options, lora_targets=targets)
    assert len(_adapter(tmp_path / "run", 1)) == 2 * found
    to_megatron(tmp_path / "model", _checkpoint(tmp_path / "run", 1), tmp_path / "megatron")
    with refused(SettingError, "lora_targets", *wrong):
        run(tmp_path / "other", **options, lora_targets=wrong[0])


def test_the_experts_of_a_family(tmp_path: Path, run: Run) -> None:
    case, rank = sdar_moe.CASE, OPTIONS["lora_rank"]
    options = {**OPTIONS, "task": "pretrain", "model": str(case.write(tmp_path / "model")), "data": ["mock"]}
    options |= {"mask_token_id": 99, "steps": 2, "seq_length": case.length, "lora_targets": "q_proj,experts"}
    run(tmp_path / "run", **options)
    factors = _adapter(tmp_path / "run", 2)
    experts = {name: tensor for name, tensor in factors.items() if ".experts." in name}
    assert (len(factors), len(experts)) == (2 * 4 * 3, 2 * 4 * 2)  # of four layers
    assert all(tensor.abs().max() > 0 for tensor in experts.values())
    assert all(rank * case.config["num_experts"] in tensor.shape for tensor in experts.values())
    with refused(SettingError, "lora_dora", "experts"):
        run(tmp_path / "dora", **options, lora_dora=True)


@pytest.mark.parametrize(
    ("changes", "field", "named"),
    [
        ({"lora_targets": "experts"}, "lora_targets", "experts"),
        ({"from_scratch": True}, "from_scratch", "adapter"),
        ({"lora_rank": -1}, "lora_rank", "-1"),
        ({"lora_dropout": 1.0}, "lora_dropout", "[0, 1)"),
        ({"lora_rank": 0, "lora_alpha": 3.0}, "lora_alpha", "`lora_rank`"),
        ({"lora_rank": 0, "lora_dora": True}, "lora_dora", "`lora_rank`"),
        ({"lora_quantize": "2bit"}, "lora_quantize", "4bit, 8bit"),
        ({"lora_rank": 0, "lora_quantize": "4bit"}, "lora_quantize", "`lora_rank`"),
        ({"adapter": "somewhere"}, "lora_rank", "`adapter`"),
        ({"lora_targets": "lm_head"}, "lora_targets", "lm_head"),
        ({"engine": "megatron", "lora_dropout": 0.1}, "lora_dropout", "`engine=accelerate`"),
    ],
)
def test_what_is_refused(tmp_path: Path, tune: Any, changes: dict[str, Any], field: str, named: str) -> None:
    with refused(SettingError, field, named):
        tune(tmp_path / "run", steps=1, **changes)


def test_what_is_missing_is_named(tmp_path: Path, tune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "bitsandbytes")
    with refused(CheckpointError, "nowhere"):
        tune(tmp_path / "run", steps=1, lora_rank=0, adapter="nowhere")
    with pytest.raises(DlmBridgeError, match=r"bitsandbytes.*dlm-bridge\[quantize\]"):
        tune(tmp_path / "run", steps=1, lora_quantize="4bit")
    tune(tmp_path / "adapter", steps=1)
    with pytest.raises(DlmBridgeError, match="is an adapter"):
        tune(tmp_path / "again", steps=1, model=str(_checkpoint(tmp_path / "adapter", 1)))
