"""`dlm-bridge serve` as a process: its start, its end, and what it refuses before it listens."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from dlm_bridge.cli.app import main
from dlm_bridge.generation.offline import write_texts
from dlm_bridge.loading import Placement, load_model
from tests.checkpoints import write_tokenizer
from tests.cli.conftest import TEMPLATE, TOKENIZER

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from fastapi.testclient import TestClient  # noqa: E402

from dlm_bridge.serving.server import Server  # noqa: E402

WAIT_S = 300


@contextmanager
def serving(
    folder: Path,
    *words: str,
    key: str | None = "secret",
    code: str = "",
    descriptors: int = 0,
    device: str | None = "cpu",
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a server that listens, and its address. `code` takes the place of dlm_bridge.cli."""
    begin = ["-c", code] if code else ["-m", "dlm_bridge.cli"]
    command = [sys.executable, *begin, "serve", str(folder), "--port", "0", *words]
    command += [] if device is None else ["--device", device]
    limit = ["prlimit", f"--nofile={descriptors}"] if descriptors else []
    environment = {**os.environ, **({} if key is None else {"DLM_BRIDGE_API_KEY": key})}
    process = subprocess.Popen(
        limit + command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, bufsize=1
    )
    try:
        assert process.stdout is not None
        said = re.search(r"http://127\.0\.0\.1:\d+/v1", process.stdout.readline())
        assert said, process.communicate()[1]
        yield process, said[0]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_server_and_what_it_samples(llada: Path, number: int, code: int) -> None:
    with serving(llada, "--set", "block_length=8", "--batch-size", "1") as (process, address):
        client = openai.OpenAI(base_url=address, api_key="secret", timeout=WAIT_S)
        assert client.models.list().data[0].id == llada.name
        stream = client.completions.create(model="any", prompt="the", max_tokens=248, n=128, stream=True)
        assert next(iter(stream)).choices  # of more than 30,000 tokens
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    assert "Traceback" not in out + err
    assert err.count("interrupted") == (number == signal.SIGINT)
    with pytest.raises(openai.APIError, match="shut down"):
        list(stream)


@pytest.mark.slow
def test_transformers_own_chat_talks_to_it(llada: Path, tmp_path: Path) -> None:
    folder = tmp_path / "chatty"
    shutil.copytree(llada, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with serving(folder, "--batch-size", "auto", key=None) as (process, address):
        assert process.stderr is not None
        assert any(line.startswith("batch size") for line in process.stderr)
        chat = [sys.executable, "-m", "dlm_bridge.cli", "transformers", "chat", "chatty", address]
        done = subprocess.run(
            [*chat, "max_new_tokens=16", "do_sample=False"],
            input="hi\nn\n!exit\n",
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
            env={**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "0"},  # else it would not even ask this machine
        )
        client = openai.OpenAI(base_url=address, api_key="none", timeout=WAIT_S)
        answer = client.chat.completions.create(
            model="", messages=[{"role": "user", "content": "hi"}], max_tokens=16, temperature=0
        )
    assert done.returncode == 0, done.stderr
    assert "<chatty>:" in done.stdout
    printable = [word for word in re.findall(r"\w+", answer.choices[0].message.content or "") if len(word) > 1]
    assert all(word in done.stdout for word in printable)
    assert "token limit" in done.stdout


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A model that writes no text."""
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 272}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path, TOKENIZER)
    return tmp_path


def refusal(*words: str) -> int:
    """Exit code of the command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dlm-bridge", *words])
        with pytest.raises(SystemExit) as exit_:
            main()
    return int(exit_.value.code or 0)


def test_what_cannot_be_served_is_one_line(llada: Path, bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            "BertForMaskedLM": [str(bert), "--port", "0"],
            port: [str(llada), "--port", port],
            "--port": [str(llada), "--port", "65536"],
            "--queue-size": [str(llada), "--queue-size", "0"],
            "frobnicate": [str(llada), "--set", "frobnicate=1"],
            "block_length": [str(llada), "--set", "block_length=0"],
            "--batch-size": [str(llada), "--batch-size", "many"],
            "nowhere": ["--host", "nowhere.invalid", str(llada)],
            "--api-key": [str(llada), "--api-key", " secret"],
            "--allowed-host": [str(llada), "--allowed-host", "http://a.example"],
            "--cors-origin": [str(llada), "--cors-origin", "a.example"],
        }
        for named, words in cases.items():
            assert refusal("serve", *words) == 2, named
            (line,) = capsys.readouterr().err.splitlines()
            assert named in line


def test_an_empty_key_is_no_open_door(
    llada: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLM_BRIDGE_API_KEY", "")
    assert refusal("serve", str(llada), "--port", "0") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "DLM_BRIDGE_API_KEY" in line


@pytest.mark.parametrize(
    ("words", "warned", "reached"),
    [
        ([], False, {"127.0.0.1": 200, "localhost:80": 200, "evil.example": 400}),
        (
            ["--host", "localhost", "--allowed-host", "a.example"],
            False,
            {"localhost": 200, "a.example": 200, "b": 400},
        ),
        (["--host", "0.0.0.0"], True, {"a.example": 200}),
        (["--host", "0.0.0.0", "--api-key", "secret"], False, {"a.example": 200}),
        (["--host", "0.0.0.0", "--allowed-host", "a.example"], True, {"a.example": 200, "127.0.0.1": 400}),
    ],
)
def test_who_may_reach_the_server(
    llada: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    warned: bool,
    reached: dict[str, int],
) -> None:
    codes: dict[str, int] = {}

    def serve_forever(server: Server) -> None:
        client = TestClient(server.config.app)
        codes.update({host: client.get("/metrics", headers={"Host": host}).status_code for host in reached})

    monkeypatch.setattr(Server, "serve_forever", serve_forever)
    assert refusal("serve", str(llada), "--port", "0", *words) == 0
    assert codes == reached
    first = capsys.readouterr().err.partition("\n")[0]
    assert ("warning" in first and "0.0.0.0" in first) == warned


@pytest.mark.slow
def test_a_full_table_of_descriptors_is_one_line(llada: Path) -> None:
    with serving(llada, key=None, descriptors=160) as (process, address), contextlib.ExitStack() as stack:
        port = int(address.removesuffix("/v1").rpartition(":")[2])
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(b"GET /health HTTP/1.1\r\n")
        client = openai.OpenAI(base_url=address, api_key="none", timeout=WAIT_S)
        assert client.completions.create(model="", prompt="the", max_tokens=8).choices
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "Traceback" not in out + err
    assert len(err.splitlines()) < 10


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_waits_for_no_thread(llada: Path, number: int) -> None:
    """Neither for a prompt that is encoded nor for a forward pass."""
    stuck = (
        "import time; from dlm_bridge.generation.engine import SamplingEngine; from dlm_bridge.serving import model;"
        "model.ServedModel.jobs = SamplingEngine.step = lambda *_: time.sleep(600);"
        "from dlm_bridge.cli.__main__ import run; run()"
    )
    with serving(llada, key=None, code=stuck) as (process, address), socket.socket() as client:
        client.connect(("127.0.0.1", int(address.removesuffix("/v1").rpartition(":")[2])))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        client.sendall(head + b'Content-Length: 15\r\n\r\n{"prompt": "a"}')
        time.sleep(1)
        began = time.monotonic()
        process.send_signal(number)
        assert b" 503 " in client.recv(64)
        out, err = process.communicate(timeout=WAIT_S)
    assert time.monotonic() - began < 10
    assert process.returncode == (0 if number == signal.SIGTERM else 130)
    assert "Traceback" not in out + err


def test_a_folder_s_name_is_printable(
    llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, models = tmp_path / "it\x1b[31m", []
    shutil.copytree(llada, folder)

    def serve_forever(server: Server) -> None:
        server._when_ready()
        models.append(TestClient(server.config.app, "http://localhost").get("/v1/models").json()["data"][0]["id"])

    monkeypatch.setattr(Server, "serve_forever", serve_forever)
    assert refusal("serve", str(folder), "--port", "0") == 0
    assert models == [r"it\x1b[31m"]
    assert models[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [("serve", "prometheus_client", "serve"), ("app", "gradio", "app"), ("transformers serve", "openai", "serve")],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, missing: str, extra: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("dlm_bridge.serving.command.find_spec", lambda name: None if name == missing else found(name))
    assert refusal(*command.split(), "nowhere") == 2
    error = capsys.readouterr().err
    assert missing in error
    assert f"pip install 'dlm-bridge[{extra}]'" in error


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_two_processes_share_a_model(llada: Path, number: int) -> None:
    """With the texts of one, and an end for both: by a signal to the launcher, or of one of them."""
    loaded = load_model(llada, Placement("cpu"))
    prompts = ["the", "a cat", "he"]
    with serving(llada, "--nproc-per-node", "2", "--set", "block_length=8", device=None) as (process, address):
        client = openai.OpenAI(base_url=address, api_key="secret", timeout=WAIT_S)
        for settings in ({}, {"temperature": 1.0, "seed": 3}):
            answer = client.completions.create(model="any", prompt=prompts, max_tokens=16, **settings)  # type: ignore[call-overload]
            own = {"gen_length": 16, "block_length": 8, **settings}
            ids = [loaded.tokenizer(prompt)["input_ids"] for prompt in prompts]
            wanted = write_texts(loaded.model, loaded.tokenizer, ids, own).texts
            assert [choice.text for choice in answer.choices] == list(wanted)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="any", prompt="<mask>", max_tokens=8)
        stream = client.completions.create(model="any", prompt="the", max_tokens=248, n=128, stream=True)
        assert next(iter(stream)).choices
        stream.close()  # its jobs leave both engines
        assert client.completions.create(model="any", prompt="a", max_tokens=8).choices
        family = psutil.Process(process.pid).children()
        assert len(family) == 2
        if number == signal.SIGKILL:
            family[1].kill()
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
        assert not psutil.wait_procs(family, timeout=30)[1]
    assert process.returncode == {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGKILL: 137}[signal.Signals(number)]
    assert "Traceback" not in out + err
    assert err.count("interrupted") == (number == signal.SIGINT)
    assert ("rank 1 was killed" in err) == (number == signal.SIGKILL)
