"""The dry run: what it shows, that it writes nothing, and that it refuses what a run would refuse."""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dlm_bridge.cli.app import main
from dlm_bridge.data.indexed import IndexedWriter
from dlm_bridge.errors import CheckpointError, DlmBridgeError, InputFileError, SettingError
from dlm_bridge.loading.source import ModelSource
from dlm_bridge.plan.dry_run import DryRun, dry_run
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.files import read_yaml
from tests.canvas_models import has_class, write_canvas_model
from tests.data.chats import conversation, write_rows
from tests.refusals import refused
from tests.train.conftest import _cache, corpus, seed_folder, tokenizer, values

SHORT = {"split": "100,0,0", "global_batch_size": 8}


@pytest.fixture(autouse=True)
def _unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def show(values: dict[str, Any], tmp_path: Path) -> Any:
    """dry_run of the short run's options, changed."""

    def _show(gpus: int | None = None, resume: bool = False, **changes: Any) -> DryRun:
        return dry_run(TrainConfig.from_flags(**{**values, "output": str(tmp_path / "run"), **changes}), gpus, resume)

    return _show


@pytest.fixture
def command(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`dlm-bridge pretrain` in this process: its exit code."""

    def _command(*flags: str) -> int:
        options = ["--model", values["model"], "--from-scratch", "--data", values["data"][0], "--seq-length", "16"]
        monkeypatch.setattr(
            sys,
            "argv",
            ["dlm-bridge", "pretrain", *options, "--output", str(tmp_path / "run"), "--steps", "9", *flags],
        )
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(str(stopped.value.code or 0))

    return _command


def test_shows_a_config_file_a_layout_and_every_stage(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert command("--dry-run", "--engine", "megatron", "--pp", "2", "--tp", "2", "--gpus", "8") == 0
    shown = capsys.readouterr().out
    settings = shown[: shown.index("\n\n")]
    (tmp_path / "again.yaml").write_text(settings)
    found = read_yaml(tmp_path / "again.yaml")
    assert (found["objective"], found["tp"], found["pp"]) == ("masked", 2, 2)
    assert TrainConfig.from_flags(**found).to_yaml().strip() == settings.strip()
    assert "8 devices, --engine megatron" in shown
    assert "Memory per GPU in MiB (4 GPUs per pipeline stage)" in shown
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "again.yaml"} == before


def test_as_json(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--dry-run", "--json", "--global-batch-size", "12", "--micro-batch-size", "2", "--gpus", "3") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["micro_batches"], found["tokens_per_step"]) == (3, 2, 12 * 16)
    assert {group["name"]: group["size"] for group in found["layout"]} == {"tp": 1, "cp": 1, "dp": 3, "pp": 1}
    assert found["memory"]["stages"][0]["held"] == found["memory"]["parameters"]
    assert found["config"]["objective"] == "masked"


def test_groups_are_megatron_cores(show: Any) -> None:
    from megatron.core.parallel_state import RankGenerator

    found = show(16, engine="megatron", tp=2, pp=2, cp=2, **SHORT)
    generator = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=2, order="tp-cp-ep-dp-pp")
    for group in found.groups:
        assert list(group.ranks) == generator.get_ranks(group.name)[0], group.name


def test_data_are_counted_without_being_read(show: Any, tmp_path: Path, corpus: Path) -> None:
    with IndexedWriter(tmp_path / "pair", np.dtype("uint16")) as writer:
        writer.add(np.arange(2, 102), [60, 40])
    found = show(data=["2", str(tmp_path / "pair"), "1", str(corpus)])
    assert [(piece.weight, piece.tokens) for piece in found.data] == [(2.0, 100), (1.0, None)]
    assert found.data[1].nbytes == corpus.stat().st_size


def test_tokens_of_a_pair_that_the_model_does_not_have(show: Any, tmp_path: Path) -> None:
    for name, first, message in (("large", 200, "token id 299, the model has 288"), ("mask", 1, "the mask token")):
        with IndexedWriter(tmp_path / name, np.dtype("uint16")) as writer:
            writer.add(np.arange(first, first + 100), [60, 40])
        with refused(InputFileError, tmp_path / f"{name}.bin", message):
            show(data=[str(tmp_path / name)])


def test_the_launchers_processes_count(
    show: Any, command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert show().gpus == 2
    with refused(SettingError, "gpus", "4", "2"):
        show(4)
    monkeypatch.setenv("RANK", "1")
    assert command("--dry-run") == 0
    assert capsys.readouterr().out == ""  # the first process shows it


def test_experts_need_sequence_parallelism(show: Any) -> None:
    """Of a model with experts, before any layout of it."""
    recipe = str(Path(__file__).parents[2] / "configs/llada-moe-7b-a1b")
    options = {"model": recipe, "data": ["mock"], "engine": "megatron", "tp": 2, **SHORT}
    assert show(2, **options).memory is not None
    with refused(SettingError, "sequence_parallel", "tp=2"):
        show(2, **options, sequence_parallel=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_dispatcher": "flex"}, "moe_dispatcher"),
    ],
)
def test_options_that_would_say_nothing_of_these_experts(show: Any, changes: dict[str, Any], message: str) -> None:
    recipe = str(Path(__file__).parents[2] / "configs/llada-moe-7b-a1b")
    with pytest.raises(DlmBridgeError, match=message):
        show(1, model=recipe, data=["mock"], engine="megatron", **SHORT, **changes)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="of machines without Transformer Engine")
@pytest.mark.parametrize(
    "setting",
    ["optimizer.use_precision_aware_optimizer=true", "transformer.apply_rope_fusion=true", "ddp.nccl_ub=true"],
)
def test_what_only_this_machine_lacks_is_left_to_the_run(show: Any, setting: str) -> None:
    assert show(1, engine="megatron", megatron=[setting], **SHORT).memory is not None
    assert show(1, engine="megatron", precision="bf16", optimizer_cpu_offload=True, **SHORT).memory is not None


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"engine": "megatron", "tp": 3}, 3, "seq_length"),
    ({"engine": "megatron", "tp": 3, "seq_length": 15}, 3, "tp"),
    ({"engine": "megatron", "tp": 2}, 3, "gpus"),
    ({"engine": "megatron", "pp": 2, "vp": 2}, 2, "pp"),
    ({"engine": "megatron", "ep": 2}, 2, "ep"),
    ({"engine": "megatron", "fsdp": "optim", "distributed_optimizer": False}, 1, "fsdp"),
    ({"engine": "megatron", "cp": 2, "cp_comm_type": "a2a", "tp": 2}, 4, "cp_comm_type"),
    ({"engine": "megatron", "megatron": ["transformer.no_such_key=1"]}, 1, "megatron"),
    ({"engine": "megatron", "megatron": ["transformer.tensor_model_parallel_size=2"]}, 1, "megatron"),
    ({"engine": "megatron", "megatron": ["transformer.num_layers=4"]}, 1, "megatron"),
    ({"engine": "megatron", "megatron": ["transformer.moe_router_dtype=fp31"]}, 1, "megatron"),
    ({"engine": "megatron", "megatron": ["ddp.bucket_size=many"]}, 1, "megatron"),
    ({"engine": "megatron", "megatron": ["optimizer.exp_avg_dtype=bf15"]}, 1, "megatron"),
    ({"engine": "megatron", "megatron": ["optimizer.exp_avg_dtype=bfloat16"]}, 1, "megatron-core"),
    ({"sample_interval": 2, "sample_prompt": ["@/nowhere/at/all"]}, 1, "/nowhere/at/all"),
    ({"engine": "megatron", "attention_backend": "sdpa"}, 1, "attention_backend"),
    ({"global_batch_size": 7}, 2, "global_batch_size"),
    ({"sharding": "fsdp", "fsdp_replicas": 2, "global_batch_size": 6}, 3, "fsdp_replicas"),
    ({"data": ["/nowhere/at/all.txt"]}, 1, "/nowhere/at/all.txt"),
    ({"model": "/nowhere/at/all"}, 1, "/nowhere/at/all"),
    ({"from_scratch": False}, 1, "{model}"),
    ({"seq_length": 128}, 1, "seq_length"),
    ({"objective": "block"}, 1, "objective"),
    ({"tokenizer": "/nowhere/at/all"}, 1, "/nowhere/at/all"),
]


@pytest.mark.parametrize(("changes", "gpus", "field"), REFUSED)
def test_refuses_what_a_run_would_refuse(
    show: Any, seed_folder: Path, changes: dict[str, Any], gpus: int, field: str
) -> None:
    with pytest.raises(DlmBridgeError) as raised:
        show(gpus, **{**SHORT, **changes})
    assert raised.value.field == field.format(model=seed_folder), str(raised.value)


def test_an_output_that_holds_a_run(show: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("")
    with refused(SettingError, "output"):
        show()
    assert show(resume=True).step == 0


def test_its_options_are_no_others(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--json") == 2
    assert command("--gpus", "2") == 2
    assert "--gpus needs --dry-run" in capsys.readouterr().err


def test_a_shard_s_name_of_any_length_is_one_short_line(
    seed_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(seed_folder, tmp_path / "model")
    save_file({"lm_head.weight": torch.zeros(1)}, model / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"lm_head.weight": "x" * 100_000}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    options = ["--model", str(model), "--data", "mock", "--output", str(tmp_path / "run"), "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", "pretrain", *options, "--steps", "9"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "File name too long" in said
    assert len(said) < 2000


def test_weights_that_are_cut_and_adapters_take_less(
    show: Any, seed_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = (show(gpus=4, sharding=sharding, precision="bf16").memory for sharding in ("none", "fsdp"))
    assert cut.peak.total < whole.peak.total
    replicas, half = (
        show(gpus=gpus, sharding="fsdp", fsdp_replicas=number).memory for gpus, number in ((4, 2), (2, 1))
    )
    assert cut.peak.optimizer < replicas.peak.optimizer == half.peak.optimizer
    offloaded = show(gpus=4, sharding="fsdp", cpu_offload=True, ema_decay=0.9)
    assert offloaded.memory.peak.optimizer == 0 < offloaded.memory.peak.host
    assert any("`ema_decay`" in note for note in offloaded.notes)
    model = tmp_path / "model"
    saved = ModelSource(str(seed_folder), seed=0).load()
    saved.save_pretrained(model)
    options = {"model": str(model), "from_scratch": False, "tokenizer": str(seed_folder), "lora_rank": 4}
    planned = show(**options)
    assert planned.memory.peak.trained < planned.memory.peak.held
    with monkeypatch.context() as patch:
        patch.setattr(ModelSource, "check_quantization", lambda _: None)
        assert show(**options, lora_quantize="8bit").memory is None
    assert planned.config.model.lora_targets == "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    with refused(SettingError, "lora_targets", "lm_head"):
        show(**options, lora_targets="lm_head")
    saved.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    options["model"] = str(tmp_path / "shards")
    assert show(**options).config == planned.config.replace(model=options["model"])
    shard = max((tmp_path / "shards").glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(DlmBridgeError, match=f"{shard.name}.* is missing"):
        show(**options)
    options["model"] = str(model)
    (model / "model.safetensors").write_bytes(b"")
    with refused(CheckpointError, model / "model.safetensors"):
        show(**options)


@has_class
def test_a_model_that_megatron_core_lacks_has_no_memory_plan(tmp_path: Path) -> None:
    """And nothing advises the engine that is in use."""
    model = write_canvas_model(tmp_path / "gemma")
    data = write_rows(tmp_path / "chats.jsonl", [conversation(4)])
    given = {"model": str(model), "data": [str(data)], "output": str(tmp_path / "run"), "task": "sft", "steps": 1}
    planned = dry_run(TrainConfig.from_flags(**given, seq_length=64, global_batch_size=1))
    assert planned.memory is None
    (note,) = (note for note in planned.notes if "no memory plan" in note)
    assert "engine=accelerate" not in note
