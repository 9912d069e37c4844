"""--optimizer-instances: every layout against one process, resumed with another number of them too, norms and averages
counted once, and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.train.config import TrainConfig
from tests.parallel.megatron_cases import Files
from tests.parallel.megatron_instances_worker import AVERAGED, QUICK, SLOW
from tests.parallel.megatron_worker import LayoutChanges, Results
from tests.processes import assert_ok
from tests.refusals import refused
from tests.train.conftest import read_metrics

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
WORKER = "tests.parallel.megatron_instances_worker"
FIELD = "optimizer_instances"


def launched(changes: LayoutChanges, folder: Path) -> tuple[Files, Results]:
    files = Files(folder).write_some(*changes.subjects)
    return files, changes.launch(WORKER, folder, changes.name)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Results]:
    return launched(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Results]:
    return launched(SLOW, tmp_path_factory.mktemp("slow"))


def is_as_one_process(subject: str, files: Files, name: str, whole: str) -> None:
    """The norms of every step, before and after the resume, of the whole parameters and of each layer's gradients; and
    by how much every tensor has moved."""
    found, wanted = (read_metrics(files.run(run)) for run in (name, whole))
    assert len(found) == len(wanted) == 4
    for row, expected in zip(found, wanted, strict=True):
        for key in ("param_norm", "layer_grad_norms"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4), (key, row, expected)
    begun = Bridge.from_hf(files.hub(subject))
    ended, wanted_end = (Bridge.from_megatron(files.run(run) / "checkpoints") for run in (name, whole))
    for tensor in wanted_end.hub_names():
        moved, apart = (wanted_end.read(tensor) - other.read(tensor) for other in (begun, ended))
        assert moved.abs().max() > 0 or "expert" in tensor, tensor
        assert apart.abs().max() <= 1e-3 * moved.abs().max() + 1e-8, tensor


@pytest.mark.parametrize(("processes", "name"), QUICK.checks)
def test_layouts(processes: int, name: str, quick: tuple[Files, Results]) -> None:
    assert_ok(name, quick[1][processes], processes)


@pytest.mark.parametrize(("subject", "name"), QUICK.runs)
def test_runs(subject: str, name: str, quick: tuple[Files, Results]) -> None:
    is_as_one_process(subject, quick[0], name, QUICK.whole(subject))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "name"), SLOW.checks)
def test_other_layouts(processes: int, name: str, slow: tuple[Files, Results]) -> None:
    assert_ok(name, slow[1][processes], processes)


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "name"), SLOW.runs)
def test_runs_of_other_layouts(subject: str, name: str, slow: tuple[Files, Results]) -> None:
    is_as_one_process(subject, slow[0], name, SLOW.whole(subject))


@pytest.mark.slow
def test_averages(tmp_path: Path) -> None:
    """Of --ema-decay, each instance's shards gathered inside it."""
    files, said = launched(AVERAGED, tmp_path)
    for processes, name in AVERAGED.checks:
        assert_ok(name, said[processes], processes)
    ((subject, name),) = AVERAGED.runs
    found, wanted = (
        Bridge.from_megatron(files.run(run) / "checkpoints", averaged=True) for run in (name, AVERAGED.whole(subject))
    )
    for tensor in wanted.hub_names():
        assert torch.allclose(found.read(tensor), wanted.read(tensor), rtol=0, atol=1e-6), tensor


def config(**changes: Any) -> TrainConfig:
    given = {"model": "m", "data": ["mock"], "output": "o", "engine": "megatron", "precision": "bf16"}
    return TrainConfig.from_flags(**{**given, "optimizer_instances": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"distributed_optimizer": False}, FIELD),
        ({"optimizer": "sgd"}, FIELD),
        ({"engine": "accelerate"}, FIELD),
        ({"fsdp": "optim"}, FIELD),
        ({"optimizer_instances": 0}, FIELD),
        ({"megatron": ["ddp.num_distributed_optimizer_instances=2"]}, "megatron"),
        ({"megatron": ["ddp.outer_dp_sharding_strategy=optim"]}, "megatron"),
    ],
)
def test_options_that_exclude_it(changes: dict[str, Any], field: str) -> None:
    from dlm_bridge.parallel.train.settings import check_settings

    with refused(SettingError, field):
        check_settings(config(**changes))


def test_experts_exclude_it_with_fsdp() -> None:
    from dlm_bridge.parallel.train.mcore_config import check_experts, data_parallel_config

    assert data_parallel_config(config()).num_distributed_optimizer_instances == 2
    with refused(SettingError, FIELD):
        check_experts(config(fsdp="optim_grads"))


@pytest.mark.parametrize(
    ("layout", "ranks", "what"),
    [
        (Layout(tp=2), 12, "the 6 data and context"),
        (Layout(ep=4), 8, "the 2 data parallel ranks of experts"),
    ],
)
def test_ranks_that_it_does_not_divide(layout: Layout, ranks: int, what: str) -> None:
    layout.check_optimizer_instances(2, ranks)
    with pytest.raises(DlmBridgeError, match=f"4.*{what}"):
        layout.check_optimizer_instances(4, ranks)


def test_fsdp_that_would_shard_nothing() -> None:
    Layout(tp=2).check_optimizer_instances(2, 8, fsdp=True)
    with pytest.raises(DlmBridgeError, match=r"optimizer.instances.*4"):
        Layout(tp=2).check_optimizer_instances(4, 8, fsdp=True)
