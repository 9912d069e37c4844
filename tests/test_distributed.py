"""Which process this is, by the launcher's variables, and the default process group's start and end."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist

from dlm_bridge import distributed
from dlm_bridge.distributed import first_on_main
from dlm_bridge.errors import InputFileError, RowError, SettingError
from dlm_bridge.job import process_group_ends, start_process_group
from dlm_bridge.replicas import ALONE, Replicas
from tests.refusals import refused

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_process() -> None:
    assert (distributed.rank(), distributed.world_size(), distributed.local_world_size()) == (0, 1, 1)
    assert distributed.is_main()
    assert not distributed.launched()
    assert distributed.local_rank() is distributed.store_address() is None
    assert Replicas.of_launcher(tp=1) is ALONE
    assert not dist.is_initialized()


def test_the_launcher_says_which_process_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("5", "8", "1", "4", "host", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert (distributed.rank(), distributed.world_size()) == (5, 8)
    assert (distributed.local_rank(), distributed.local_world_size()) == (1, 4)
    assert distributed.launched()
    assert not distributed.is_main()
    assert distributed.store_address() == ("host", 29500)


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
    monkeypatch.setattr(distributed, "_before_end", [lambda: released.append(dist.is_initialized())])
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
