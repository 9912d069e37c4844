"""How the processes of a job meet, what they refuse before they start, and the output folder that they share."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dlm_bridge import job
from dlm_bridge.errors import DlmBridgeError, LayoutError, SettingError, WorkerError
from dlm_bridge.train import output as outputs
from dlm_bridge.train.output import opened_output, write_status
from tests import launcher
from tests.processes import environments, free_port
from tests.refusals import refused

TIMEOUT_S = 20.0


def _meet(case: str, root: Path, environment: list[dict[str, str]] | None = None) -> list[Any]:
    """What the case of each of two processes, as of two hosts, returned or raised."""
    each = environments(2) if environment is None else environment
    for rank, variables in enumerate(each):
        variables["HOST"] = f"node{rank}"
    root.mkdir(exist_ok=True)
    logs = [root / f"log_{rank}.txt" for rank in range(len(each))]
    launcher.run(__name__, [case, str(root)], each, logs, timeout_s=240)
    results = [root / f"{variables['RANK']}.json" for variables in each]
    assert all(path.is_file() for path in results), [log.read_text() for log in logs]
    return [json.loads(path.read_text()) for path in results]


def test_a_restarted_job_does_not_meet_the_earlier_attempt(tmp_path: Path) -> None:
    """In torchrun's store, which keeps the keys of the first attempt, with counts of restarts that differ."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    tokens = set()
    for attempt in range(3):
        each = environments(2)
        for rank, variables in enumerate(each):
            variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
            variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt * rank)
        found = _meet("sum", tmp_path / str(attempt), each)
        assert [result["sum"] for result in found] == [3.0, 3.0]
        (token,) = {result["token"] for result in found}
        tokens.add(token)
    assert len(tokens) == 3
    del store


def test_processes_are_counted_by_host(tmp_path: Path) -> None:
    each = environments(2)
    for variables in each:
        del variables["LOCAL_RANK"]
    found = _meet("sum", tmp_path, each)
    assert [result["local"] for result in found] == [["0", "1"], ["0", "1"]]
    assert [result["prefix"] for result in found] == ["[rank 0, node0] ", "[rank 1, node1] "]
    assert [result["other"] for result in found] == ["rank 1 (node1)", "rank 0 (node0)"]


@pytest.mark.parametrize(("case", "field"), [("settings", "steps"), ("versions", "dlm_bridge"), ("clocks", "clock")])
def test_what_differs_on_a_host_is_refused_everywhere(case: str, field: str, tmp_path: Path) -> None:
    for kind, named, reason in _meet(case, tmp_path):
        assert (kind, named) == ("SettingError", field)
        assert "node1" in reason
    assert [(tmp_path / f"prefix_{rank}").read_text() for rank in (0, 1)] == ["[rank 0, node0] ", "[rank 1, node1] "]


def test_a_folder_that_a_host_does_not_see_is_refused_everywhere(tmp_path: Path) -> None:
    for kind, field, reason in _meet("folders", tmp_path):
        assert (kind, field) == ("SettingError", "output"), reason
        assert "node1" in reason
    assert list((tmp_path / "node0").iterdir()) == []


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    first, second = environments(3)[:2]
    for kind, field, _ in _meet("alone", tmp_path, [first, second]):
        assert (kind, field) == ("WorkerError", "rank 2")
    ((kind, field, _),) = _meet("alone", tmp_path / "late", [environments(2)[1]])
    assert (kind, field) == ("WorkerError", "rank 0")


def test_an_unusable_address_is_refused(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        first = environments(2)[0] | {"MASTER_PORT": str(other.getsockname()[1])}
        ((kind, field, _),) = _meet("alone", tmp_path, [first])
        assert (kind, field) == ("SettingError", "MASTER_PORT")
        second = environments(2)[1] | {"MASTER_PORT": first["MASTER_PORT"]}
        ((kind, field, _),) = _meet("alone", tmp_path, [second])
        assert (kind, field) == ("WorkerError", "rank 0")
    second = environments(2)[1] | {"MASTER_ADDR": "no-such-host.invalid"}
    ((kind, field, reason),) = _meet("alone", tmp_path, [second])
    assert (kind, field) == ("SettingError", "MASTER_ADDR")
    assert "no-such-host.invalid" in reason


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"MASTER_ADDR": ".invalid"}, "MASTER_ADDR"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT"),
        ({"RANK": "2"}, "RANK"),
        ({"WORLD_SIZE": "0"}, "RANK"),
    ],
)
def test_malformed_variables_are_refused(
    variables: dict[str, str], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | variables
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with refused(SettingError, field):
        job.join(0.1)


def test_malformed_variables_leave_the_lines_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "two")
    assert job.prefix() == ""


@pytest.mark.slow
def test_a_lost_store_is_named(tmp_path: Path) -> None:
    found, (kind, field, _) = _meet("lost", tmp_path)
    assert found is None
    assert (kind, field) == ("WorkerError", "rank 0 (node0)")


def test_an_unexpected_error_of_a_decision_ends_every_rank(tmp_path: Path) -> None:
    first, (kind, field, reason) = _meet("undecided", tmp_path)
    assert first == "KeyError"
    assert (kind, field) == ("WorkerError", "rank 0 (node0)")
    assert "no decision" in reason


def test_a_process_group_waits_longer_than_the_ranks_for_a_heartbeat(tmp_path: Path) -> None:
    assert _meet("group", tmp_path) == ["value", "value"]


def test_the_other_hosts_address_is_not_a_loopback_one(tmp_path: Path) -> None:
    """The first host's name, which is MASTER_ADDR, is a loopback address on that host."""
    assert _meet("peers", tmp_path) == [["10.0.0.2"], ["127.0.0.1"]]


def test_a_loopback_host_name_gets_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    addresses = {"lo": [mock.Mock(address="127.0.0.1")], "eth7": [mock.Mock(address="10.0.0.4")]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: addresses)
    monkeypatch.setattr(job, "_own_address", lambda host: {"10.0.0.9": "10.0.0.4"}.get(host, ""))
    with refused(LayoutError, "GLOO_SOCKET_IFNAME", socket.gethostname()):
        job._choose_interface("10.9.9.9")
    job._choose_interface("10.0.0.9")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_an_output_folder_has_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with opened_output(folder, resume=False):
        second = [sys.executable, "-c", _SECOND, str(folder)]
        said = subprocess.run(second, check=True, capture_output=True, text=True).stdout
        assert said.split()[:2] == ["output", str(os.getpid())]
        write_status(folder, "running", 3, 8)
    with pytest.raises(KeyboardInterrupt), opened_output(folder, resume=True):
        raise KeyboardInterrupt
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"
    assert [path.name for path in folder.iterdir()] == ["status.json"]
    write_status(folder, "finished", 8, 8)
    with pytest.raises(KeyboardInterrupt), opened_output(folder, resume=True):
        raise KeyboardInterrupt
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    (folder / "config.yaml").touch()
    with refused(SettingError, "output", "config.yaml"), opened_output(folder, resume=False):
        pass


def test_an_error_of_a_run_is_not_one_of_its_lock(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), opened_output(tmp_path, resume=False):
        raise FileNotFoundError(2, "No such file or directory", "data.jsonl")


def test_a_lock_that_its_owner_removes_meanwhile_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next run could lock another file of this name."""
    lockf, calls = fcntl.lockf, []

    def late(file: Any, kind: int) -> None:
        lockf(file, kind)
        calls.append(kind)
        if len(calls) == 1:
            (tmp_path / ".lock").unlink()

    monkeypatch.setattr(fcntl, "lockf", late)
    with opened_output(tmp_path, resume=False):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_run_without_output_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DlmBridgeError), opened_output(tmp_path / "new" / "run", resume=False):
        raise DlmBridgeError("bad input")
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with opened_output(tmp_path, resume=False):
            os._exit(9)
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").is_file()
    with opened_output(tmp_path, resume=False):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


_SECOND = """
import sys, pathlib
from dlm_bridge.errors import SettingError
from dlm_bridge.train.output import opened_output
try:
    with opened_output(pathlib.Path(sys.argv[1]), resume=True):
        pass
except SettingError as error:
    print(error.field, error.reason.partition("process ")[2])
"""


# -- in the processes


def _sum(_: Path) -> dict[str, Any]:
    joined = job.join(TIMEOUT_S)
    assert joined is not None
    rank = int(os.environ["RANK"])
    with job.process_group_ends():
        job.start_process_group("gloo")
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
    local = [os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]]
    names = {"prefix": job.prefix(), "other": job.named_rank(1 - rank)}
    return {"sum": total.item(), "token": joined.token, "local": local, **names}


def _settings(_: Path) -> None:
    job.join(TIMEOUT_S, {"steps": int(os.environ["RANK"]) + 3, "data": ["mock"]})


def _versions(_: Path) -> None:
    with mock.patch("dlm_bridge.__version__", os.environ["RANK"]):
        job.join(TIMEOUT_S)


def _clocks(_: Path) -> None:
    with mock.patch("time.time", return_value=time.time() + 100 * int(os.environ["RANK"])):
        job.join(TIMEOUT_S)


def _folders(root: Path) -> None:
    """Each host has a folder of its own at the same place."""
    joined = job.join(TIMEOUT_S)
    assert joined is not None
    job._joined[0] = dataclasses.replace(joined, timeout_s=5.0)  # less than a rank may look for the lock
    own = root / os.environ["HOST"]
    own.mkdir()
    with mock.patch.object(outputs, "SHARED_WITHIN_S", 6.0), opened_output(own, resume=False):
        raise AssertionError("not refused")


def _alone(_: Path) -> None:
    job.join(1.0)


def _outlast_join(root: Path) -> None:
    """In the first process, which has the store: wait until the second one has joined."""
    (root / f"joined_{os.environ['RANK']}").touch()
    deadline = time.monotonic() + TIMEOUT_S
    while not (root / "joined_1").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _lost(root: Path) -> None:
    joined = job.join(TIMEOUT_S)
    assert joined is not None
    _outlast_join(root)
    if os.environ["RANK"] == "1":
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:  # until the first process, which has the store, has ended
            joined.agree("value", None, len)


def _undecided(_: Path) -> Any:
    joined = job.join(TIMEOUT_S)
    assert joined is not None
    try:
        joined.agree("value", None, lambda _: {}["no decision"])
    except KeyError as error:
        return type(error).__name__


def _group(_: Path) -> str:
    joined = job.join(TIMEOUT_S)
    assert joined is not None
    job._joined[0] = dataclasses.replace(joined, timeout_s=1.0)
    with job.process_group_ends():
        job.start_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        if os.environ["RANK"] == "0":
            time.sleep(2)
            store.set("late", "value")
        value = store.get("late").decode()
        dist.barrier()
        return value


def _peers(root: Path) -> list[str]:
    found: list[str] = []
    own = "127.0.1.1" if os.environ["RANK"] == "0" else "10.0.0.2"
    with (
        mock.patch.object(job, "_own_address", return_value=own),
        mock.patch.object(job, "_choose_interface", found.append),
    ):
        job.join(TIMEOUT_S)
    _outlast_join(root)
    return found


CASES: dict[str, Callable[[Path], Any]] = {
    "sum": _sum,
    "settings": _settings,
    "versions": _versions,
    "clocks": _clocks,
    "folders": _folders,
    "alone": _alone,
    "lost": _lost,
    "undecided": _undecided,
    "group": _group,
    "peers": _peers,
}


def main(case: str, root: Path) -> None:
    result: Any = None
    with mock.patch.object(socket, "gethostname", return_value=os.environ["HOST"]):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            result = CASES[case](root)
        except (SettingError, WorkerError) as error:
            result = [type(error).__name__, error.field, error.reason]
        (root / f"prefix_{os.environ['RANK']}").write_text(job.prefix())
    (root / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    launcher.end(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
