"""The router in front of replicas without a model, which are processes that can be killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

import psutil  # noqa: E402

from dlm_bridge.replica_router import fleet  # noqa: E402
from dlm_bridge.replica_router.router import RouterServer  # noqa: E402
from dlm_bridge.serving.connections import bind  # noqa: E402
from dlm_bridge.serving.options import ServeOptions  # noqa: E402
from tests.serving.conftest import PATIENCE_S, wait_until  # noqa: E402

STUB = Path(__file__).parent / "stub.py"


@dataclass
class Routed:
    """A router that answers."""

    address: str
    router: RouterServer
    folder: Path

    @property
    def log(self) -> list[str]:
        """What the replicas did."""
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def pids(self) -> list[int]:
        """Ids of the replicas' processes."""
        found = {}
        for child in psutil.Process().children():
            words = child.cmdline()
            if str(self.folder) in words:
                found[words[-1]] = child.pid
        return [found[index] for index in sorted(found)]

    def get(self, path: str, **headers: str) -> Any:
        return httpx.get(f"{self.address}{path}", headers=headers, timeout=PATIENCE_S)

    def post(self, prompt: str, path: str = "completions", **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
        return httpx.post(f"{self.address}/v1/{path}", json=body | fields, timeout=PATIENCE_S)

    def text(self, prompt: str, **fields: Any) -> str:
        answer = self.post(prompt, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def wait(self, true: Callable[[], bool], what: str) -> None:
        wait_until(true, what)

    def ready(self) -> bool:
        return bool(self.get("/health").json()["ready"] == self.get("/health").json()["replicas"])


@contextmanager
def routed(folder: Path, *, replicas: int = 2, **options: Any) -> Iterator[Routed]:
    """A router, with stubs, until the end of the context."""
    given = ServeOptions(**{"queue_size": 64, "timeout": PATIENCE_S, **options})
    commands = [([sys.executable, "-S", str(STUB), str(folder), str(index)], os.environ) for index in range(replicas)]
    sock, said = bind("127.0.0.1", 0), list[str]()
    router = RouterServer(commands, given, sock, said.append)
    thread = threading.Thread(target=router.serve_forever)
    thread.start()
    try:
        wait_until(lambda: bool(said) or not thread.is_alive(), "the router's start")
        assert said == ["tiny (stub): " + said[0].partition(": ")[2]]
        yield Routed(f"http://127.0.0.1:{sock.getsockname()[1]}", router, folder)
    finally:
        router.should_exit = True
        thread.join(PATIENCE_S)
    assert not [child for child in psutil.Process().children() if str(folder) in child.cmdline()]


def events(answer: Any) -> list[Any]:
    """Events of a stream."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    with routed(tmp_path_factory.mktemp("routed")) as found:
        yield found


def test_every_endpoint_reaches_a_replica(at: Routed) -> None:
    assert at.get("/health").json() == {"status": "ok", "replicas": 2, "ready": 2}
    assert at.get("/v1/models").json() == {"replica": "0"}
    assert at.get("/", Host="a.example").text == "<html>a.example</html>"
    assert httpx.head(f"{at.address}/docs").status_code in (200, 501)  # the stub knows no HEAD
    assert at.text("a", seed=3) == "<a:3>"
    for path in ("completions", "infill", "commits"):
        assert at.post("[MASK]" if path == "infill" else "b", path).status_code == 200
    unknown = at.get("/v1/unknown")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


def test_metrics_name_their_replica(at: Routed) -> None:
    lines = at.get("/metrics").text.splitlines()
    for index in (0, 1):
        assert f'dlm_bridge_tokens_total{{replica="{index}"}} 7.0' in lines
        assert f'dlm_bridge_router_ready{{replica="{index}"}} 1.0' in lines
    assert sum(line.startswith("# TYPE dlm_bridge_batch_size") for line in lines) == 1


def test_what_is_malformed_reaches_no_replica(at: Routed) -> None:
    before = len(at.log)
    refused = at.post("a", max_tokens="many")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert at.post("a", n=65).status_code == 400  # more than the queue holds
    assert httpx.post(f"{at.address}/v1/completions", content=b"{}").status_code == 415
    assert len(at.log) == before


def test_a_key_is_checked_before_the_queue(tmp_path: Path) -> None:
    with routed(tmp_path, replicas=1, api_key="secret") as at:
        assert at.post("a").status_code == 401
        assert at.get("/health").status_code == 200
        assert not at.log


def test_a_request_outlives_its_replica(at: Routed) -> None:
    """It is answered by another one, and the process is replaced."""
    before, pids = at.get("/metrics").text, at.pids
    assert 'replaced_total{replica="0"} 0.0' in before
    assert at.text("die once", seed=5) == "<die once:5>"
    at.wait(at.ready, "the process is replaced")
    assert len(set(at.pids) - set(pids)) == 1
    assert "dlm_bridge_router_retries_total 1.0" in at.get("/metrics").text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_without_text_outlives_its_replica(at: Routed, path: str) -> None:
    """Also the stream of a chat, whose first event is the role."""
    (at.folder / "died").unlink(missing_ok=True)
    found = events(at.post("die once", path, stream=True, seed=6))
    assert found.pop() == "[DONE]"
    choices = [event["choices"][0] for event in found]
    if path.startswith("chat"):
        assert choices.pop(0)["delta"]["role"] == "assistant"
    assert "".join(each["text"] if "text" in each else each["delta"]["content"] for each in choices) == "<die once:6>"
    at.wait(at.ready, "the process is replaced")


def test_a_stream_with_text_ends_with_an_error(at: Routed) -> None:
    first, last = events(at.post("die in", stream=True))
    assert "<die in:0>".startswith(first["choices"][0]["text"])
    assert last["error"]["code"] == "replica_lost"
    at.wait(at.ready, "the process is replaced")


def test_a_request_that_kills_replicas_is_given_up(at: Routed) -> None:
    given_up = at.post("die")
    assert (given_up.status_code, given_up.json()["error"]["code"]) == (503, "replica_lost")
    at.wait(at.ready, "the processes are replaced")
    assert at.text("a") == "<a:0>"


def test_a_replica_that_does_not_answer_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "CHECK_S", 0.1)
    monkeypatch.setattr(fleet, "PATIENCE_S", 1.0)
    with routed(tmp_path, replicas=1) as at:
        (stopped,) = at.pids
        os.kill(stopped, signal.SIGSTOP)
        at.wait(lambda: stopped not in at.pids and at.ready(), "it is replaced")
        assert at.text("a") == "<a:0>"


@contextmanager
def in_background(count: int, call: Callable[[int], Any]) -> Iterator[list[Future[Any]]]:
    with ThreadPoolExecutor(count) as threads:
        yield [threads.submit(call, number) for number in range(count)]


def test_the_queue_is_bounded_and_keeps_its_order(tmp_path: Path) -> None:
    with routed(tmp_path, replicas=1, queue_size=2) as at:  # five texts at the replica, two in the queue
        with in_background(7, lambda number: at.text(f"wait {number}", seed=number)) as sent:
            at.wait(lambda: "dlm_bridge_router_queue_rows 2.0" in at.get("/metrics").text, "the queue is full")
            assert len(at.log) == 5
            full = at.post("one more")
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert int(full.headers["Retry-After"]) >= 1
            (tmp_path / "go").touch()
        assert [each.result() for each in sent] == [f"<wait {number}:{number}>" for number in range(7)]


def test_a_client_that_leaves_frees_its_replica(tmp_path: Path) -> None:
    with routed(tmp_path, replicas=1) as at, httpx.Client(base_url=at.address, timeout=0.5) as impatient:
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                impatient.post("/v1/completions", json={"prompt": "wait", "stream": stream})
        at.wait(lambda: at.log.count("0 left") == 2, "the replica sees it")
        at.wait(lambda: 'sent_rows{replica="0"} 0.0' in at.get("/metrics").text, "its place is free")


def test_a_request_has_a_time_limit(tmp_path: Path) -> None:
    with routed(tmp_path, replicas=1, timeout=0.5) as at:
        assert at.post("wait").status_code == 504
        *_, last = events(at.post("wait", stream=True))
        assert last["error"]["code"] == "timeout"


def test_the_end_answers_what_is_open(tmp_path: Path) -> None:
    with routed(tmp_path, replicas=1, queue_size=2) as at:
        with in_background(7, lambda number: at.post(f"wait {number}")) as sent:
            at.wait(lambda: "dlm_bridge_router_queue_rows 2.0" in at.get("/metrics").text, "they are open")
            at.router.should_exit = True
        codes = [(each.result().status_code, each.result().json()["error"]["code"]) for each in sent]
    assert codes == [(503, "closed")] * 7


def test_a_failed_start_is_reported_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "refuse").touch()
    commands = [([sys.executable, "-S", str(STUB), str(tmp_path), str(index)], os.environ) for index in range(3)]
    router = RouterServer(commands, ServeOptions(), bind("127.0.0.1", 0), lambda _: pytest.fail("not ready"))
    with pytest.raises(SystemExit) as ended:
        router.run(sockets=[])
    assert ended.value.code == 2
    assert capfd.readouterr().err == "dlm-bridge: no such model\n"


def test_a_server_without_replicas_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_WAIT_S", 0.01)
    with routed(tmp_path, replicas=1) as at:
        (tmp_path / "refuse").touch()
        os.kill(at.pids[0], signal.SIGKILL)
        at.wait(lambda: at.router.should_exit, "the router ends")
        assert at.router._fleet.failure is not None
        at.router._fleet.failure = None  # raised in the thread
