"""Which process this is, by the launcher's variables, and the default process group's start and end."""

from __future__ import annotations

import os
import pickle

import pytest
import torch.distributed as dist

from dlm_bridge import distributed, job
from dlm_bridge.distributed import first_on_main
from dlm_bridge.errors import InputFileError, RowError, SettingError
from dlm_bridge.job import process_group_ends, start_process_group
from dlm_bridge.replicas import ALONE, Replicas
from tests.refusals import refused

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STEP = {  # variables of a task of a Slurm step
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[003-005,9]-a,login1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_process() -> None:
    assert (distributed.rank(), distributed.world_size(), distributed.local_world_size()) == (0, 1, 1)
    assert distributed.is_main()
    assert not distributed.launched()
    assert distributed.local_rank() is job.join() is None
    assert Replicas.of_launcher(tp=1) is ALONE
    assert not dist.is_initialized()


def test_the_launcher_says_which_process_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("5", "8", "1", "4", "host", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert (distributed.rank(), distributed.world_size()) == (5, 8)
    assert (distributed.local_rank(), distributed.local_world_size()) == (1, 4)
    assert distributed.launched()
    assert not distributed.is_main()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"},
        {"CUDA_VISIBLE_DEVICES": "3"},
        {"SLURM_STEP_NUM_NODES": "1"},
        {"SLURM_STEP_NODELIST": "node7"},
    ],
    ids=str,
)
def test_a_task_of_a_slurm_step_has_its_rank(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**STEP, **given})
    assert (distributed.rank(), distributed.world_size()) == (5, 8)
    assert distributed.local_rank() == (0 if "CUDA_VISIBLE_DEVICES" in given else 1)
    hosts = {"{}": "gpu003-a", "node7": "node7", "1": "127.0.0.1"}
    expected = given.get("MASTER_ADDR") or hosts.get(next(iter(given.values()), "{}"), "gpu003-a")
    assert os.environ["MASTER_ADDR"] == expected
    port = int(os.environ["MASTER_PORT"])
    assert port == 29500 if "MASTER_PORT" in given else 15_000 <= port < 30_000


@pytest.mark.parametrize("given", [{"SLURM_STEP_NUM_TASKS": "1"}, {"WORLD_SIZE": "2", "RANK": "1"}], ids=str)
def test_slurm_does_not_rank_a_single_task_or_a_launched_process(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**STEP, **given})
    assert (distributed.rank(), distributed.world_size()) == (
        int(given.get("RANK", 0)),
        int(given.get("WORLD_SIZE", 1)),
    )
    assert "MASTER_PORT" not in os.environ


@pytest.mark.parametrize(
    "given",
    [
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_SIZE": "8", **STEP},
        {"PMI_SIZE": "4"},
        {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "29500"},
    ],
    ids=str,
)
def test_a_launcher_without_ranks_is_refused(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every process would be a run of its own, in the same folder."""
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with refused(SettingError, "WORLD_SIZE"):
        job.join()


def test_a_single_process_of_a_job_of_several_tasks_is_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a batch script without srun."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert job.join() is None
    assert "4 tasks" in caplog.text


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("value", ["two", "-1", "1.5"])
def test_a_damaged_variable_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with refused(SettingError, name, value):
        distributed.rank() if name == "RANK" else distributed.world_size()


def test_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with refused(SettingError, "MASTER_ADDR"):
        start_process_group("gloo")


def test_a_process_group_ends_where_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bool] = []
    monkeypatch.setattr(job, "_before_end", [lambda: released.append(dist.is_initialized())])
    with process_group_ends():
        start_process_group("gloo")
        with process_group_ends():
            start_process_group("gloo")
        assert dist.is_initialized()
        assert not released
        with refused(InputFileError, "a.jsonl"):
            first_on_main(_fail)
        assert first_on_main(lambda: 3) == 3
    assert not dist.is_initialized()
    assert released == [True]


def test_an_error_of_a_share_names_its_rank_and_keeps_its_class() -> None:
    with refused(RowError, "row 3", "(rank 1)") as raised, Replicas(rank=1, processes=2).named():
        raise RowError("has no mask token", [3])
    assert pickle.loads(pickle.dumps(raised.value)).reason == raised.value.reason


def _fail() -> None:
    raise InputFileError("a.jsonl", "has no rows")
