"""Reinforcement learning under FSDP2 is that of one process: rollouts, losses, gradients, checkpoints, resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlm_bridge.errors import LayoutError, ResourceError, SettingError
from dlm_bridge.generation import batch_size
from dlm_bridge.train.rl import replica
from dlm_bridge.train.rl.accelerate_engine import gather_weights
from dlm_bridge.train.rl.replica import RolloutModel
from dlm_bridge.train.rl.rollout import Rollouts
from tests.families.llada_moe import CASE as EXPERTS
from tests.families.sdar import CASES as BLOCKS
from tests.processes import assert_ok, forked, launch
from tests.refusals import refused
from tests.rl.conftest import SPECIAL, Run, letters, write_llada, write_llama
from tests.rl.sharding_worker import WORLDS, names


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, problems: Path, reward: str) -> Path:
    """Where the checks have run."""
    root = tmp_path_factory.mktemp("rl_sharding")
    write_llada(root / "policy", heads=4)
    write_llama(root / "causal", heads=4)
    # Seeds at which the first step's rewards differ within a group: else there would be nothing to learn from.
    for case, folder, seed in ((EXPERTS, root / "experts", 0), (BLOCKS[0], root / "blocks", 2)):
        case.write(folder, seed=seed, **SPECIAL)
        letters().save_pretrained(folder)
    (root / "problems.jsonl").write_text("".join(problems.read_text().splitlines(keepends=True)[:7]))
    pairs = [{"prompt": f"a{letter}", "chosen": "cc", "rejected": letter} for letter in "bcdefgh"]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (root / "wanted.py").write_text(Path(reward.partition(":")[0]).read_text())
    launch("tests.rl.sharding_worker", root, processes=1, timeout_s=1100)  # the reports say what failed
    return root


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "name"), [(number, name) for number in WORLDS for name in names(number)])
def test_check(processes: int, name: str, root: Path) -> None:
    assert_ok(name, forked(root / f"reports-{processes}", processes), processes)


def test_one_process_can_be_cut(run: Run, tmp_path: Path) -> None:
    changes = {"steps": 2, "beta": 0.1}
    plain = run(tmp_path / "plain", **changes)
    cut = run(tmp_path / "cut", **changes, sharding="fsdp")
    for one, other in zip(cut, plain, strict=True):
        assert {key: one[key] for key in ("reward", "loss", "grad_norm", "kl")} == pytest.approx(
            {key: other[key] for key in ("reward", "loss", "grad_norm", "kl")}, rel=1e-5, abs=1e-7
        )


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.other.weight = self.one.weight
        self.register_buffer("rates", torch.arange(3.0), persistent=False)

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {}


def test_a_whole_model_has_weights_only_while_allocated() -> None:
    model = _Tied()
    copied = RolloutModel(model, torch.float32, "")
    model.rates.fill_(7)
    for value in (1.0, 2.0):
        nn.init.constant_(model.one.weight, value)
        with copied.allocated(torch.device("cpu")) as whole:
            gather_weights(model, copied, torch.device("cpu"))
            assert whole.one.weight is whole.other.weight
            assert torch.equal(whole.one.weight, model.one.weight)
            assert torch.equal(whole.rates, model.rates)
        assert copied.model.one.weight.is_meta
        assert copied.model.one.weight is copied.model.other.weight


def test_weights_that_do_not_fit_beside_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "free_memory", lambda device: 15)
    with (
        refused(ResourceError, "rollouts", "offload it"),
        RolloutModel(_Tied(), torch.float32, "offload it").allocated(torch.device("cpu")),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ("sharding=fsdp", "beta=0", "precision=bf16", "gen_length")),
        ({"sharding": "fsdp", "precision": "bf16"}, ("cpu_offload", "rollout_tp", "beta=0")),
        ({"sharding": "fsdp", "cpu_offload": True, "beta": 0.0}, ("rollout_tp", "precision=bf16")),
        ({"method": "grpo", "beta": 0.0}, ("sharding=fsdp",)),
    ],
)
def test_a_row_that_does_not_fit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    """One line that says how much is missing and what the run can still offload; plain data parallelism included."""
    if changes.get("method") == "grpo":
        changes = {**changes, "model": str(write_llama(tmp_path / "causal"))}
    monkeypatch.setattr(batch_size, "free_memory", lambda device: 100)
    with refused(ResourceError, "rollouts", *named) as raised:
        run(tmp_path / "run", **changes)
    assert "\n" not in str(raised.value)
    assert ("`cpu_offload`" in str(raised.value)) == (not changes.get("cpu_offload"))


def test_memory_that_runs_out_in_a_rollout(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Rollouts, "_sampled", fails)
    with refused(ResourceError, "rollouts", "32 rows", "rollout_batch_size"):
        run(tmp_path / "run")


def test_ranks_that_do_not_share_a_model(run: Run, tmp_path: Path) -> None:
    for changes, kind in (({}, SettingError), ({"sharding": "fsdp"}, LayoutError)):
        with refused(kind, "rollout_tp"):
            run(tmp_path / "run", rollout_tp=2, **changes)
