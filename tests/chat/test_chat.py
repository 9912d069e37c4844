"""`dlm-bridge chat` in a pseudo-terminal: history, commands, Ctrl-C; and with a server in the model's place."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from dlm_bridge.chat.local import LocalModel
from dlm_bridge.chat.remote import RemoteModel
from dlm_bridge.chat.session import Session
from dlm_bridge.cli.app import main
from dlm_bridge.errors import DlmBridgeError, InputFileError, SettingError
from dlm_bridge.generation.offline import write_texts
from dlm_bridge.loading import LoadedModel, load_model
from tests.checkpoints import write_llada, write_tokenizer
from tests.cli import conftest
from tests.cli.conftest import EOS, MASK, TEMPLATE, TOKENIZER
from tests.refusals import refused

pexpect = pytest.importorskip("pexpect")

qwen3 = conftest.qwen3  # a fixture
WAIT_S = 200
PROMPT = r"(?:^|\n|\x1b\[\?2004h)> "
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Forward passes that take a while, so that Ctrl-C comes in the middle of an answer, and a process that would end soon
# after it if nobody prevented that.
SLOW = """
import time
from dlm_bridge import processes
from dlm_bridge.display.trace import LiveTrace
processes.GRACE_S = 0.1
add = LiveTrace.add
LiveTrace.add = lambda *given: (time.sleep(0.03), add(*given))
from dlm_bridge.cli.__main__ import run
run()
"""


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaDA whose tokenizer has a chat template."""
    sizes = {"vocab_size": 272, "embedding_size": 272, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS}
    folder = write_llada(tmp_path_factory.mktemp("models") / "llada", **sizes)
    write_tokenizer(folder, TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(llada: Path) -> LoadedModel:
    return load_model(str(llada))


def answer_to(loaded: LoadedModel, messages: list[dict[str, str]], **settings: Any) -> str:
    """The model's answer, without `chat`."""
    ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return write_texts(loaded.model, loaded.tokenizer, [ids], settings).texts[0]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Terminal:
    """A chat in a pseudo-terminal of 80 columns."""

    def __init__(self, *words: str, code: str = SLOW) -> None:
        command = ["-c", code, "chat", *words]
        self.process = pexpect.spawn(sys.executable, command, encoding="utf-8", timeout=WAIT_S, dimensions=(24, 80))
        self.process.expect(PROMPT)

    def say(self, line: str) -> str:
        """Enter a line. Returns what is shown up to the next prompt, as plain text."""
        self.process.sendline(line)
        self.process.expect(PROMPT)
        return ESCAPES.sub("", self.process.before)

    def end(self) -> int | None:
        """Send the end of the input. Returns the exit code."""
        self.process.sendeof()
        self.process.expect(pexpect.EOF)
        self.process.close()
        return self.process.exitstatus


def test_a_conversation_in_the_terminal(llada: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    """History is in the prompt, /reset empties it, Ctrl-C stops an answer and nothing else, settings apply."""
    terminal = Terminal(str(llada), "--gen-length", "12", "--system", "be brief", "--device", "cpu")
    shown = terminal.say("hi")
    assert "probability" in shown  # the live view
    assert "12 forward passes" in shown
    terminal.say("and you?")
    terminal.process.sendline("/set gen_length=120")
    terminal.process.expect(PROMPT)
    terminal.process.sendline("a long one")
    terminal.process.expect(r"forward \d+, [1-9]")
    terminal.process.sendintr()
    terminal.process.expect(PROMPT)
    assert "Stopped" in ESCAPES.sub("", terminal.process.before)
    assert "temperature" in terminal.say("/set temprature=1")  # a near miss, which changes nothing
    terminal.say("/set gen_length=6")
    terminal.say("/set preset=fast")
    terminal.say("go on")
    terminal.say(f"/save {tmp_path}/one.jsonl")
    assert "New conversation" in terminal.say("/reset")
    terminal.say("and you?")
    terminal.say(f"/save {tmp_path}/two.jsonl")
    assert terminal.end() == 0

    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.jsonl", "two.jsonl"))
    assert one["settings"] == two["settings"] == {"gen_length": 6, "preset": "fast"}
    expected = [{"role": "system", "content": "be brief"}]
    for text, settings in (
        ("hi", {"gen_length": 12}),
        ("and you?", {"gen_length": 12}),
        ("go on", {"gen_length": 6, "preset": "fast"}),
    ):
        expected.append(user(text))
        expected.append(assistant(answer_to(loaded, expected, **settings)))
    assert one["messages"] == expected
    alone = [expected[0], user("and you?")]
    assert two["messages"] == [*alone, assistant(answer_to(loaded, alone, gen_length=6, preset="fast"))]
    assert two["messages"][-1]["content"] != expected[4]["content"][:6]


class Recorder:
    """A partner of a conversation that repeats how many messages it got."""

    name = "recorder"

    def check(self, settings: Any) -> None:
        if "bad" in settings:
            raise SettingError("bad", "is unknown")

    def describe(self, settings: Any) -> str:
        return "none"

    def answer(self, messages: Any, settings: Any, console: Console) -> tuple[str, str]:
        return str(len(messages)), "done"

    def stop(self) -> bool:
        return False


def test_commands(tmp_path: Path) -> None:
    session = Session(Recorder(), {}, None)
    with refused(SettingError, "/sav", "/save"):
        session.command("/sav x")
    with refused(SettingError, "/save"):
        session.command("/save x.jsonl")  # no messages yet
    session.say("hi")
    file, other = tmp_path / "chat.jsonl", tmp_path / "other.txt"
    other.write_text("mine")
    for _ in range(2):  # its own file is replaced, another is not
        session.command(f"/save {file}")
        session.say("more")
    assert len(json.loads(file.read_text())["messages"]) == 4
    with refused(InputFileError, other):
        session.command(f"/save {other}")
    assert other.read_text() == "mine"
    session.command("/set seed=3")
    session.command("/set stop_strings=a b")
    for pair in ("bad=1", "bad", "tokenizer=x"):
        with pytest.raises(DlmBridgeError):
            session.command(f"/set {pair}")
    assert session.settings == {"seed": 3, "stop_strings": "a b"}
    session.command("/set seed=default")
    assert session.settings == {"stop_strings": "a b"}
    with pytest.raises(EOFError):
        session.command("/quit")


def test_near_misses_are_named_for_an_autoregressive_model(qwen3: Path) -> None:
    speaker = LocalModel(load_model(str(qwen3)), "qwen3", {})
    speaker.check({"temperature": 0.7, "gen_length": 3})
    for settings, field, named in (
        ({"topp": 0.5}, "topp", "top_p"),
        ({"preset": "fast"}, "preset", "autoregressive"),
        ({"temperature": -1}, "temperature", "0"),
    ):
        with refused(SettingError, field, named):
            speaker.check(settings)
    answer, summary = speaker.answer([user("hi")], {"gen_length": 3}, Console(file=io.StringIO()))
    assert answer == answer_to(speaker.loaded, [user("hi")], gen_length=3)
    assert "3 tokens" in summary


@pytest.mark.parametrize(
    ("settings", "field", "named"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"steps": 0}, "steps", "1"),
        ({"algorithm": "sdar"}, "algorithm", "llada"),
        ({"algorithm": "mdlm", "preset": "fast"}, "preset", "careful"),
        ({"preset": "quick"}, "preset", "fast"),
        ({"threshold": 0.9, "factor": 1.0}, "threshold", "factor"),
    ],
)
def test_settings_are_checked_before_they_apply(
    loaded: LoadedModel, settings: dict[str, Any], field: str, named: str
) -> None:
    with refused(SettingError, field, named):
        LocalModel(loaded, "llada", {}).check(settings)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["m"], "terminal"),
        ([], "--url"),
        (["m", "--presett", "fast"], "--preset"),
        (["m", "--preset", "quick"], "fast"),
        (["m", "--set", "seed=1", "--seed", "2"], "--seed"),
    ],
)
def test_bad_use_is_one_line(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", "chat", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


class Server(ThreadingHTTPServer):
    """A server with OpenAI's API that records the requests and answers the message "fail" with an error."""

    bodies: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.headers["Authorization"] != "Bearer secret":
            return self._send(401, json.dumps({"error": {"message": "a key"}}))
        pieces: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in ("\x1b[2Jto", None, " you")]
        if body["messages"][-1]["content"] == "fail":
            pieces = [*pieces[:1], {"error": {"message": "it broke"}}]
        self._send(200, "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n")

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.bodies = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_answers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    session = Session(RemoteModel.connect(url, "secret", None, {}), {"gen_length": 5, "min_p": 0.1}, None)
    session.say("hi")
    session.say("and you?")
    answer = "\x1b[2Jto you"
    assert session.messages == [user("hi"), assistant(answer), user("and you?"), assistant(answer)]
    body = {"model": "first", "stream": True, "max_tokens": 5, "min_p": 0.1}
    assert server.bodies[-1] == {**body, "messages": session.messages[:3]}
    assert "\x1b[2J" not in capsys.readouterr().out  # a server does not control the terminal
    with refused(SettingError, "url", "it broke"):
        session.say("fail")
    assert len(session.messages) == 4
    assert RemoteModel.connect(f"{url}/v1", None, "second", {"a": 1}).name == "second"
    with refused(SettingError, "model", "first, second"):
        RemoteModel.connect(url, None, "third", {})
    with refused(SettingError, "url", "401"):
        Session(RemoteModel.connect(url, None, None, {}), {}, None).say("hi")
    with refused(SettingError, "max_token", "max_tokens"):
        session.command("/set max_token=3")
    with refused(SettingError, "temperature"):
        session.command("/set temperature=warm")
    session.command("/set best_of_server=3")  # unknown here, perhaps not there


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://127.0.0.1:9"])
def test_no_server_is_named(url: str) -> None:
    with refused(SettingError, "url", url):
        RemoteModel.connect(url, None, None, {})


@pytest.mark.slow
@pytest.mark.extension("serving")
def test_a_chat_with_dlm_bridge_serve(llada: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from tests.cli.test_serve import serving

    with serving(llada) as (_, address):
        chat = ("--url", address, "--api-key", "secret", "--gen-length", "12")
        terminal = Terminal(*chat, code="from dlm_bridge.cli.__main__ import run; run()")
        terminal.say("hi")
        terminal.say("/set preset=careful")
        terminal.say("and you?")
        assert "steps" in terminal.say("/set step=3")
        terminal.say("/set algorithm=sdar")
        assert "400" in terminal.say("refused there")
        terminal.say(f"/save {tmp_path}/chat.jsonl")
        assert terminal.end() == 0
    messages: list[dict[str, str]] = []
    for text, settings in (("hi", {}), ("and you?", {"preset": "careful"})):
        messages.append(user(text))
        messages.append(assistant(answer_to(loaded, messages, gen_length=12, **settings)))
    assert json.loads((tmp_path / "chat.jsonl").read_text())["messages"] == messages
