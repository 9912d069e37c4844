"""How commands end: at once at Ctrl-C with one line and exit code 130, and with all their processes when killed."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from dlm_bridge import processes
from dlm_bridge.cli.__main__ import run
from dlm_bridge.registration import registered
from tests.processes import free_port
from tests.train.conftest import undrawn

TIMEOUT_S = 25.0  # to be busy, and to end
HANGING = """
import pathlib, time
def hangs(prompts, completions, rows):
    pathlib.Path({busy!r}).touch()
    while True:
        pass
"""


@dataclass(frozen=True)
class Case:
    """A command, and the function in which it is interrupted, where not in one that it is given."""

    arguments: tuple[str, ...]  # with {llada}, {megatron}, {policy}, {text}, {prompts}, {reward}, {out}
    pause: str = ""
    deaf: bool = False  # the main thread waits in a library
    importing: bool = False  # it imports a module, which turns an exception into one of its own, as numpy does
    suppressed: bool = False  # a library ignores the exception

    def __str__(self) -> str:
        how = ", deaf" * self.deaf + ", importing" * self.importing + ", suppressed" * self.suppressed
        return f"{self.arguments[0]} in {self.pause.rsplit('.', 1)[-1] or 'a reward'}{how}"


WRITE = "dlm_bridge.convert.streaming.write_at"
STEP = "dlm_bridge.train.accelerate.trainer.AccelerateTrainer.forward_backward"
PRETRAIN = (
    "pretrain", "--model", "{llada}", "--data", "{text}", "--output", "{out}", "--steps", "3",
    "--global-batch-size", "2", "--seq-length", "16",
)  # fmt: skip
RL = (
    "rl", "--model", "{policy}", "--data", "{prompts}", "--output", "{out}", "--method", "diffu-grpo", "--steps", "1",
    "--global-batch-size", "4", "--group-size", "2", "--seq-length", "16", "--gen-length", "4",
    "--reward-timeout", "600", "--reward", "{reward}",
)  # fmt: skip
MEGATRON = (*PRETRAIN, "--engine", "megatron", "--async-save", "--save-interval", "1")
WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async._write_item"
INTERRUPTED = (
    Case(("import", "{llada}", "{out}", "--tp", "2", "--processes", "2"), WRITE),
    pytest.param(Case(("export", "{megatron}", "{out}"), WRITE), marks=pytest.mark.slow),  # threads that hang
    Case(("import", "{llada}", "{out}"), "dlm_bridge.convert.transfer.write_side_files", importing=True),
    Case(("inspect", "{llada}"), "dlm_bridge.convert.inspect.inspect_checkpoint", importing=True),
    pytest.param(
        Case(("inspect", "{llada}"), "dlm_bridge.convert.inspect.inspect_checkpoint", suppressed=True),
        marks=pytest.mark.slow,
    ),
    Case(("verify", "{megatron}", "{llada}"), "dlm_bridge.convert.verify.compare_tensors"),
    Case(
        ("preprocess", "{text}", "--output", "{out}", "--tokenizer", "{llada}", "--workers", "2"),
        "dlm_bridge.data.indexed.IndexedWriter.add",
    ),
    Case(("generate", "{llada}", "--prompt", "a", "--gen-length", "8"), "dlm_bridge.generation.engine.denoise_rows"),
    Case(("eval", "{llada}", "--perplexity", "{text}"), "dlm_bridge.evaluation.perplexity.likelihood_bounds"),
    Case(PRETRAIN, STEP),
    pytest.param(Case(PRETRAIN, STEP, deaf=True), marks=pytest.mark.slow),
    pytest.param(Case(MEGATRON, WRITER), marks=[pytest.mark.slow, pytest.mark.extension("parallel")]),
    pytest.param(Case(RL), marks=pytest.mark.extension("train.rl")),
)
KILLED = (
    Case(("import", "{llada}", "{out}", "--tp", "2", "--processes", "2"), WRITE),
    Case(
        ("preprocess", "{text}", "--output", "{out}", "--tokenizer", "{llada}", "--workers", "2"),
        "dlm_bridge.data.preprocess._TokenizerWork.__call__",
    ),
    pytest.param(Case(MEGATRON, WRITER), marks=[pytest.mark.slow, pytest.mark.extension("parallel")]),
    pytest.param(Case(RL), marks=pytest.mark.extension("train.rl")),
)


@pytest.fixture(scope="module")
def files(llada: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from dlm_bridge import Bridge, Layout

    root = tmp_path_factory.mktemp("files")
    Bridge.from_hf(llada).to_megatron(root / "megatron", Layout(tp=2))
    (root / "text.txt").write_text("a line of text\n" * 200)
    (root / "prompts.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "ba"}\n')
    found = {"megatron": root / "megatron", "text": root / "text.txt", "prompts": root / "prompts.jsonl"}
    if "rl" in registered("commands"):
        from tests.rl.conftest import write_llada as write_policy

        found["policy"] = write_policy(root / "policy")
    return {"llada": str(llada), **{name: str(path) for name, path in found.items()}}


@pytest.mark.parametrize("case", INTERRUPTED, ids=str)
def test_ctrl_c_ends_a_command_at_once(case: Case, files: dict[str, str], tmp_path: Path) -> None:
    _skip_without_megatron(case)
    code, said = _end(case, files, tmp_path, lambda child: os.killpg(child, signal.SIGINT))
    assert code == 130, said
    lines = [line for line in said.splitlines() if line.startswith("dlm-bridge: ")]
    assert len(lines) == 1, said
    assert "interrupted" in lines[0]
    assert "Traceback" not in said
    if case.arguments[0] not in ("pretrain", "rl"):  # whose folders have their settings
        assert not list(tmp_path.glob("out*"))


STARTING = (
    ("inspect", "{llada}"),
    ("import", "{llada}", "{out}", "--tp", "2"),
    ("generate", "{llada}", "--prompt", "a", "--gen-length", "8"),
    ("eval", "{llada}", "--perplexity", "{text}"),
    PRETRAIN,
)


# A command that says when its first line has set a handler: before that Python itself is interrupted.
TOLD_WHEN_IT_STARTS = """
import signal
from dlm_bridge.cli.__main__ import run
from dlm_bridge.registration import registered

set_handler = signal.signal

def set_first_handler(*arguments):
    signal.signal = set_handler
    found = set_handler(*arguments)
    print("starts", flush=True)
    return found

signal.signal = set_first_handler
run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", STARTING, ids=lambda arguments: arguments[0])
def test_ctrl_c_while_a_command_starts(arguments: tuple[str, ...], files: dict[str, str], tmp_path: Path) -> None:
    """In processes of their own, which import everything anew, at moments from the first one on."""
    draw, interrupted = random.Random(0), 0
    for number in range(6):
        words = [word.format(**files, out=str(tmp_path / f"out{number}")) for word in arguments]
        process = subprocess.Popen(
            [sys.executable, "-c", TOLD_WHEN_IT_STARTS, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        time.sleep(draw.uniform(0, 0.6 * number))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert "Traceback" not in said, said
        assert process.returncode in (0, 130), said  # 0: it was done
        if process.returncode == 130:
            interrupted += 1
            assert len([line for line in said.splitlines() if line.startswith("dlm-bridge: ")]) == 1, said
    assert interrupted


@pytest.mark.parametrize("case", KILLED, ids=str)
def test_a_killed_command_takes_its_processes_with_it(case: Case, files: dict[str, str], tmp_path: Path) -> None:
    _skip_without_megatron(case)
    code, _ = _end(case, files, tmp_path, lambda child: os.kill(child, signal.SIGKILL))
    assert code == -signal.SIGKILL


def test_a_job_reports_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever of its processes is the first to, in each attempt."""
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**launched, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        for rank in ("1", "0"):
            monkeypatch.setenv("RANK", rank)
            processes.report(f"no such\nfolder, says rank {rank} of attempt {attempt}")
    said = capsys.readouterr().err
    assert said == "".join(f"dlm-bridge: no such folder, says rank 1 of attempt {number}\n" for number in (0, 1))
    del store


@pytest.mark.parametrize("code", [0, 2])
@pytest.mark.fast("2")
def test_a_command_that_succeeds_destroys_its_process_groups(code: int) -> None:
    """One that fails may leave others waiting, and torchrun ends them."""
    script = (
        "import sys, atexit, torch.distributed as dist\n"
        "from dlm_bridge.cli import __main__, app\n"
        "def main():\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        f"    raise SystemExit({code})\n"
        "app.main = main\n"
        "atexit.register(lambda: print('initialized', dist.is_initialized()))\n"
        "__main__.run()\n"
    )
    found = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (code, f"initialized {code == 2}\n"), found.stderr


@pytest.mark.slow
def test_bad_input_under_torchrun_is_one_line(tmp_path: Path) -> None:
    launcher = _torchrun(
        "pretrain", "--model", "/nowhere", "--data", "mock", "--steps", "3", "--output", str(tmp_path / "out")
    )
    _, said = launcher.communicate(timeout=120)
    assert launcher.returncode != 0
    assert len([line for line in said.splitlines() if line.startswith("dlm-bridge: ")]) == 1, said
    assert "dlm_bridge/" not in said, said  # in no traceback


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(PRETRAIN), Case(MEGATRON)], ids=["launcher", "rank"])
def test_a_job_ends_with_its_launcher_and_with_a_rank(case: Case, files: dict[str, str], tmp_path: Path) -> None:
    """One of them killed: no process of the job is left, those of megatron-core's background saves included."""
    _skip_without_megatron(case)
    arguments = [word.format(**files, out=str(tmp_path / "out")) for word in case.arguments]
    launcher = _torchrun(*arguments, "--steps", "1000000")
    metrics, log = tmp_path / "out/metrics.jsonl", tmp_path / "log.txt"
    log.touch()
    try:
        _wait_for(lambda: metrics.exists() and '{"step": 3,' in metrics.read_text(), log, 240)
        family = psutil.Process(launcher.pid).children(recursive=True)
        ranks = [process for process in psutil.Process(launcher.pid).children() if "RANK" in process.environ()]
        assert len(ranks) == 2
        (ranks[1] if case.arguments is MEGATRON else launcher).kill()
        assert not psutil.wait_procs(family, timeout=30)[1]
    finally:
        launcher.kill()
        launcher.communicate()
    if case.arguments is MEGATRON:
        assert len(family) > 4  # the processes of the checkpoints


def _torchrun(*arguments: str) -> subprocess.Popen[str]:
    """The command line in two processes, of a launcher of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, "-m", "dlm_bridge.cli", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DLM_BRIDGE_PLATFORM": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _skip_without_megatron(case: Case) -> None:
    if "megatron" in case.arguments and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")


def _end(case: Case, files: dict[str, str], root: Path, end: Callable[[int], None]) -> tuple[int, str]:
    """Run a command in a session of its own and `end` it while it is busy: its exit code and what it printed. No
    process of its session may be left."""
    busy, log = root / "busy", root / "log.txt"
    (root / "reward.py").write_text(HANGING.format(busy=str(busy)))
    own = {"out": str(root / "out"), "reward": f"{root}/reward.py:hangs"}
    arguments = [word.format(**files, **own) for word in case.arguments]
    child = _start(dataclasses.replace(case, arguments=tuple(arguments)), busy, log)
    try:
        _wait_for(busy.exists, log, 4 * TIMEOUT_S)
        end(child)
        ended: list[int] = []
        _wait_for(lambda: _reaped(child, ended), log)
        _wait_for(lambda: not _session(child), log)
    finally:
        for process in _session(child):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended[0]), log.read_text()


def _start(case: Case, busy: Path, log: Path) -> int:
    """The id of the command's process: a copy of this one, which has imported what it needs. For the Megatron engine
    it is a new one: a copy hangs where it collects models of earlier tests, whose threads it lacks."""
    if "megatron" in case.arguments:
        made = f"Case(**{dataclasses.asdict(case)!r}), {str(busy)!r}, {str(log)!r}"
        source = f"from tests.cli.test_endings import Case, become; become({made})"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return os.posix_spawn(sys.executable, [sys.executable, "-c", source], environment)
    if (child := os.fork()) == 0:
        become(case, str(busy), str(log))
    return child


def become(case: Case, busy: str, log: str) -> None:
    """Be the command's process; does not return."""
    code = 1
    processes.leave_inherited()
    try:
        os.setsid()
        said = os.open(log, os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(said, stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        undrawn(pytest.MonkeyPatch())
        if case.pause:
            _pause_in(case, Path(busy))
        os.environ["DLM_BRIDGE_PLATFORM"] = "cpu"
        sys.argv = ["dlm-bridge", *case.arguments]
        run()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of a process
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


MODULE = """
import time
try:
    time.sleep(2)
except KeyboardInterrupt:
    raise ImportError("a library cannot be imported") from None
"""


def _pause_in(case: Case, busy: Path) -> None:
    owner: Any = None
    name, parts = case.pause, case.pause.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        with suppress(ModuleNotFoundError):
            owner = importlib.import_module(".".join(parts[:cut]))
            break
    for part in parts[cut:-1]:
        owner = getattr(owner, part)
    assert hasattr(owner, parts[-1]), name

    def paused(*_: Any, **__: Any) -> None:
        busy.touch()
        if case.importing:
            busy.with_name("slow_module.py").write_text(MODULE)
            sys.path.insert(0, str(busy.parent))
            importlib.import_module("slow_module")
        if case.suppressed:
            with suppress(KeyboardInterrupt):
                time.sleep(600)
        if case.deaf:
            lock = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second waits for ever, and hears of no signal
                ctypes.CDLL(None).pthread_mutex_lock(lock)
        time.sleep(600)

    setattr(owner, parts[-1], paused)


def _reaped(child: int, ended: list[int]) -> bool:
    found, status = os.waitpid(child, os.WNOHANG)
    if found:
        ended.append(status)
    return bool(found)


def _session(leader: int) -> list[int]:
    """The processes of a session, without those that have ended and are not reaped."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _wait_for(condition: Callable[[], bool], log: Path, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
