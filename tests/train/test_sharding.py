"""FSDP2 on 2 and 4 processes is one process: losses, gradients, checkpoints, resumes; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dlm_bridge.errors import SettingError
from dlm_bridge.train.accelerate.fsdp import with_launcher_settings
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.setup import model_source
from tests.autoregressive.cases import CASES as AUTOREGRESSIVE
from tests.data.chats import chatty, conversation, write_rows
from tests.families import dream, illada, llada2_moe, sdar
from tests.processes import assert_ok, forked, launch
from tests.refusals import refused
from tests.train.sharding_worker import names

VOCAB = 288
CONFIGS = {
    "masked": illada.CASES[0].config,
    "block": sdar.CASES[0].config,
    "causal": AUTOREGRESSIVE[0].config,
    "tied": {**dream.CASE.config, "tie_word_embeddings": True},
    "experts": llada2_moe.CASE.config,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Where the checks of one process and of two have run, but for the repeated ones."""
    return _run_checks(tmp_path_factory.mktemp("sharding"), tokenizer, (1, 2), every=False)


@pytest.fixture(scope="module")
def root_of_all(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Where all have run, those of four processes too, which read what the others wrote."""
    return _run_checks(tmp_path_factory.mktemp("sharding"), tokenizer, (1, 2, 4), every=True)


def _run_checks(root: Path, tokenizer: PreTrainedTokenizerFast, worlds: tuple[int, ...], every: bool) -> Path:
    own = {"vocab_size": VOCAB, "mask_token_id": tokenizer.mask_token_id, "eos_token_id": 0, "pad_token_id": 0}
    for name, config in CONFIGS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps({**config, **own, "max_position_embeddings": 256}))
    chatty(tokenizer).save_pretrained(root / "tokenizer")
    write_rows(root / "chats.jsonl", [conversation(number) for number in range(24)])
    weights = TrainConfig.from_flags(model=str(root / "masked"), data=["mock"], output="o", from_scratch=True)
    model_source(weights).load().save_pretrained(root / "weights")
    (root / "worlds.json").write_text(json.dumps([worlds, every]))
    launch("tests.train.sharding_worker", root, processes=1)  # the reports say what failed
    return root


@pytest.mark.parametrize(("processes", "name"), [(number, name) for number in (1, 2) for name in names(number, False)])
def test_check(processes: int, name: str, root: Path) -> None:
    assert_ok(name, forked(root / f"reports-{processes}", processes), processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "name"),
    [*((number, name) for number in (1, 2) for name in names(number, True)), *((4, name) for name in names(4, False))],
)
def test_other_check(processes: int, name: str, root_of_all: Path) -> None:
    assert_ok(name, forked(root_of_all / f"reports-{processes}", processes), processes)


def _config(**changes: Any) -> TrainConfig:
    return TrainConfig.from_flags(model="m", data=["d"], output="o", **changes)


def test_what_accelerate_launch_says_of_fsdp_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_launcher_settings(_config()) == _config()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with refused(SettingError, "sharding", "fsdp_version 2"):
        with_launcher_settings(_config())
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    config = with_launcher_settings(_config(precision="bf16"))
    assert (config.parallel.sharding, config.parallel.cpu_offload, config.engine.gradient_checkpointing) == (
        "fsdp",
        True,
        True,
    )
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with refused(SettingError, "precision", "bf16", "fp32"):
        with_launcher_settings(_config(precision="fp32"))


@pytest.mark.parametrize(
    ("changes", "field", "named"),
    [
        ({"sharding": "zero"}, "sharding", "none, fsdp"),
        ({"cpu_offload": True}, "cpu_offload", "`sharding=fsdp`"),
        ({"fsdp_replicas": 2}, "fsdp_replicas", "`sharding=fsdp`"),
        ({"sharding": "fsdp", "precision": "fp16"}, "precision", "`sharding=fsdp`"),
        ({"sharding": "fsdp", "lora_rank": 2, "lora_quantize": "4bit"}, "lora_quantize", "`sharding=fsdp`"),
        ({"sharding": "fsdp", "engine": "megatron"}, "sharding", "`engine=accelerate`"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], field: str, named: str) -> None:
    with refused(SettingError, field, named):
        _config(**changes)
