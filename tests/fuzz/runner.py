"""One case: a damaged copy of an input, a command in a process forked from this one, and what must not be seen."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random
from typing import NoReturn

from tests.fuzz import hostile
from tests.fuzz.damage import damage, is_plain
from tests.fuzz.inputs import KINDS, RESTORES, write_data

# Commands that run until they are interrupted, and the exit codes that they end with.
ENDS = {"serve": (2, 130), "app": (2, 130)}
CPU_S = 45  # limit of a case's processor time; its wall time depends on what else the machine does
# A case hangs after IDLE_S seconds in which it used fewer than BUSY_TICKS clock ticks of processor time (the threads
# of a waiting process use a few), or after LONGEST_S seconds in all.
IDLE_S, BUSY_TICKS, LONGEST_S = 90, 100, 1200
ROOM = 6 << 30  # limit of the bytes that a case allocates
LINES, LENGTH = 6, 2000  # limits of a refusal: lines, and characters of one
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_PROGRESS = re.compile(r"\[\d+:\d\d[<,].*\]$")  # a bar of tqdm's, with its times


@dataclass(frozen=True)
class Outcome:
    """What a command did: `code` is the exit status, negative the signal that ended it, None where it hung."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    answers: dict[str, int] = field(default_factory=dict)  # the HTTP status by request


@dataclass
class Case:
    """A case, which its seed determines."""

    seed: int
    kind: str
    words: tuple[str, ...]
    damage: list[str]
    outcome: Outcome
    faults: list[str] = field(default_factory=list)


class Fuzzer:
    """Makes the sound inputs in `root` once, and runs cases on damaged copies of them; all commands by default."""

    def __init__(self, root: Path, kinds: tuple[str, ...] = tuple(KINDS), commands: tuple[str, ...] = ()) -> None:
        self._root = root
        self._commands = {
            kind: [words for words in KINDS[kind].commands if not commands or words[0] in commands] for kind in kinds
        }
        self.kinds = kinds = tuple(kind for kind, some in self._commands.items() if some)
        root.mkdir(parents=True, exist_ok=True)
        write_data(root)
        needed = set(kinds)
        for name in reversed(KINDS):  # each comes after those that it needs
            needed |= set(KINDS[name].needs) if name in needed else set()
        for name, kind in KINDS.items():
            if name in needed and not (root / name).exists():
                kind.build(root, root / name, self._must_run)

    def run(self, seed: int) -> Case:
        """The case of a seed."""
        random = Random(seed)
        kind = random.choice(self.kinds)
        words = random.choice(self._commands[kind])
        folder = self._copy(kind, _folder_name(random))
        done = [one for _ in range(KINDS[kind].rounds) for one in damage(folder, random, KINDS[kind].weights)]
        return self._judge(seed, kind, words, folder, done)

    def hostile_cases(self, kind: str, quick: bool) -> Iterator[Case]:
        """Hostile pickles at each place of a kind of folder: where pickles are, code and a bomb under every command;
        in place of a whole file, code under one command. `quick`: only where pickles are, in the newest file of each
        name, under the command of `RESTORES`."""
        places = list(hostile.places(self._root / kind))
        commands, bombs = self._commands[kind], itertools.cycle(hostile.BOMBS)
        if quick:
            newest = {(Path(place.file).name, place.what): place for place in places if place.what != hostile.WHOLE}
            places, commands = list(newest.values()), [words for words in commands if words[0] == RESTORES[kind]][:1]
        for number, place in enumerate(places):
            whole = place.what == hostile.WHOLE
            for words in [commands[number % len(commands)]] if whole else commands:
                for name in [hostile.CODE] if whole else [hostile.CODE, next(bombs)]:
                    folder = self._copy(kind, "it")
                    hostile.put(folder, place, name)
                    yield self._judge(number, kind, words, folder, [f"hostile {place.file}: {name}, {place.what}"])

    def _copy(self, kind: str, name: str) -> Path:
        """A copy of the sound input of a kind, alone in its folder."""
        place = self._root / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        shutil.copytree(self._root / kind, place / name, symlinks=True)
        return place / name

    def _judge(self, seed: int, kind: str, words: tuple[str, ...], folder: Path, done: list[str]) -> Case:
        place = folder.parent
        places = {
            "it": str(folder), "out": str(place / "out"), "text": str(self._root / "text.txt"),
            "reward": str(self._root / "reward.py"), "port": str(_free_port()),
            **{name: str(self._root / f"{name}.jsonl") for name in ("chats", "pairs", "prompts", "rows")},
            **{name: str(self._root / name) for name in KINDS},
        }  # fmt: skip
        filled = tuple(word.format(**places) for word in words)
        requests = folder if kind == "damaged_requests" else self._root / "requests"
        case = Case(seed, kind, filled, done, self._execute(filled, requests))
        case.faults = faults(case, words)
        if (place / hostile.MARKER).exists():
            case.faults.append("code of the input ran")
        return case

    def _must_run(self, words: tuple[str, ...]) -> None:
        outcome = self._execute(words)
        if outcome.code != 0:
            raise RuntimeError(f"{' '.join(words)}: {outcome.stderr[-3000:]}")

    def _execute(self, words: tuple[str, ...], requests: Path | None = None) -> Outcome:
        """Run a command in a forked process. A server (`ENDS`) gets SIGINT once it listens, `serve` after it has been
        sent the `requests`."""
        logs = self._root / "stdout", self._root / "stderr"
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _become(words, *logs, self._root / "home")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(child, child)
        code, used, since = None, 0, began
        port = int(words[words.index("--port") + 1]) if words[0] in ENDS else None
        answers: dict[str, int] = {}
        try:
            while code is None and time.monotonic() < min(since + IDLE_S, began + LONGEST_S):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                elif (now := _cpu_ticks(child)) - used >= BUSY_TICKS:
                    used, since = now, time.monotonic()
                elif port is not None and _listens(port):
                    if requests is not None and words[0] == "serve":
                        answers = _ask(port, requests)
                    os.kill(child, signal.SIGINT)
                    port, since = None, time.monotonic()
                else:
                    time.sleep(0.01)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # with what it has started
            if code is None:
                os.waitpid(child, 0)
        if code == -signal.SIGXCPU:
            code = None
        stdout, stderr = (log.read_text("utf-8", errors="surrogateescape") for log in logs)
        return Outcome(code, stdout, stderr, time.monotonic() - began, answers)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _ask(port: int, folder: Path) -> dict[str, int]:
    """Post the files of `folder`, each to the route that its name begins with; the status of each answer."""
    found: dict[str, int] = {}
    for file in sorted(filter(is_plain, folder.iterdir())):
        client = HTTPConnection("127.0.0.1", port, timeout=IDLE_S)
        with contextlib.closing(client):
            path = file.name.partition("-")[0].removesuffix(".json").replace(".", "/")
            try:
                client.request("POST", f"/v1/{path}", file.read_bytes(), {"Content-Type": "application/json"})
                answer = client.getresponse()
                answer.read()
            except (OSError, HTTPException):  # the server has ended or hangs, which `_execute` finds
                break
            found[file.name] = answer.status
    return found


def faults(case: Case, words: tuple[str, ...]) -> list[str]:
    """The faults of a case: what a command must not do, whatever its input is. `words` are the command's, before the
    paths were filled in."""
    outcome, found = case.outcome, []
    if outcome.code is None:
        return ["hangs"]
    if outcome.code not in ENDS.get(words[0], (0, 1, 2)):
        found.append(f"ends with {outcome.code}")
    if "Traceback (most recent call last)" in outcome.stdout + outcome.stderr:
        found.append("traceback")
    found += [f"answers {status} to {name}" for name, status in outcome.answers.items() if status >= 500]
    if match := _CONTROL.search(outcome.stderr):
        found.append(f"control character {match[0]!r} on stderr")
    if words[0] != "generate" and (match := _CONTROL.search(outcome.stdout)):  # whose stdout is the model's text
        found.append(f"control character {match[0]!r} on stdout")
    lines = [line for line in outcome.stderr.splitlines() if line and not _PROGRESS.search(line)]
    longest = max((len(line) for line in lines if line.startswith("dlm-bridge: ")), default=0)  # not of libraries
    if outcome.code == 2 and (len(lines) > LINES or longest > LENGTH):
        found.append(f"{len(lines)} lines, {len(outcome.stderr)} characters on stderr")
    if outcome.code == 2 and not lines:
        found.append("exit code 2 without a word")
    if outcome.code != 2 and _lacks_weights(case, words):
        found.append(f"exit code {outcome.code} though weights are missing or truncated")
    return found


def _cpu_ticks(process: int) -> int:
    """The processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


READ_NO_WEIGHTS = ("plan", "push", "preprocess")


def _lacks_weights(case: Case, words: tuple[str, ...]) -> bool:
    """Whether a model's weights are missing or truncated, and the command reads them."""
    if words[0] in READ_NO_WEIGHTS or "--from-scratch" in words or case.kind in ("data",) or "run" in case.kind:
        return False
    suffixes = (".safetensors", ".distcp", "model_optim_rng.pt", ".bin")
    for done in case.damage:
        what, _, how = done.partition(": ")
        name = what.split(" ", 1)[1] if " " in what else ""
        if not name.endswith(suffixes) or "assets" in name:
            continue
        if what.startswith("remove ") or (what.startswith("truncate ") and how.split()[0] != how.split()[2]):
            return True
    return False


def _folder_name(random: Random) -> str:
    odd = ("it\x1b[31m", "i[/b]t", "i\nt", os.fsdecode(b"it\xff"), "it it", "it{0}%s", "it" * 60, "'it'", "it\u202e")
    return random.choice(odd) if random.random() < 0.1 else "it"


def _become(words: tuple[str, ...], stdout: Path, stderr: Path, home: Path) -> NoReturn:
    """Run the command in this forked process, with limits on memory and processor time, as if it had been started on
    its own."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the fuzzer
        os.setpgid(0, 0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        for number, place in enumerate((os.devnull, stdout, stderr)):
            os.dup2(os.open(place, flags if number else os.O_RDONLY), number)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        home.mkdir(exist_ok=True)
        os.environ |= {"HOME": str(home), "DLM_BRIDGE_PLATFORM": "cpu"}
        _caches(home)
        sys.argv = ["dlm-bridge", *words]
        from dlm_bridge.cli.__main__ import run

        run()  # with what ends a command soon after SIGINT, wherever that finds it
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    from tests.launcher import end

    end(status)


def _caches(home: Path) -> None:
    import datasets

    datasets.config.HF_DATASETS_CACHE = home / "datasets"
