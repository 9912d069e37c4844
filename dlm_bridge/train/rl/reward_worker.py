"""Reward workers: each reward function runs in a process of its own, with a time limit per call.

    python -m dlm_bridge.train.rl.reward_worker FUNCTION PARENT

is the worker, which ends with the process PARENT. It reads one JSON object per line ({"prompts", "completions",
"rows"}) and answers each with {"rewards": [...]} or {"error": "..."}. Output of the function goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dlm_bridge.errors import RowError, SettingError, counted
from dlm_bridge.processes import end_with_parent, signals_blocked
from dlm_bridge.train.rl.rewards import REWARDS

START_TIMEOUT = 120.0  # seconds for a reward's own imports


class RewardRecord(Protocol):
    """A row of data as passed to a reward, and its origin."""

    @property
    def fields(self) -> Mapping[str, Any]: ...

    @property
    def where(self) -> str:
        """File and line, for errors."""
        ...


@dataclass(frozen=True)
class RewardScores:
    """The rewards of B completions."""

    rewards: list[float]  # weighted sums
    parts: dict[str, list[float]]  # by function, unweighted
    failed: int  # rows whose reward raised or hung and counted as 0

    @classmethod
    def joined(cls, parts: Sequence[RewardScores]) -> RewardScores:
        """Concatenation of all parts."""
        return cls(
            [reward for part in parts for reward in part.rewards],
            {name: [value for part in parts for value in part.parts[name]] for name in parts[0].parts},
            sum(part.failed for part in parts),
        )


class RewardWorkers:
    """Several reward functions, each in its own process, summed with their weights."""

    def __init__(self, names: Sequence[str], timeout: float = 10.0, failure: str = "stop") -> None:
        """
        Args:
            names: short name, dotted path or file.py:name of each function, optionally with a weight, such as
                "0.1*countdown_form".
            timeout: seconds that a call may take: for a batch, and for each row if the batch fails.
            failure: "stop" raises for a row whose reward raises or hangs; "zero" counts it as 0.

        Raises:
            SettingError: a function cannot be loaded.
        """
        self.failure = failure
        self.functions = [_RewardProcess(*_weighted(name), timeout) for name in names]

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[RewardRecord]
    ) -> RewardScores:
        """Rewards of B completions. Raises RowError, with file and line of the row, for a reward that raises, hangs or
        is not finite, unless it counts as 0."""
        parts: dict[str, list[float]] = {}
        failed = 0
        for function in self.functions:
            rewards = function.call(prompts, completions, rows)
            if isinstance(rewards, str):  # call row by row, to find the one that fails
                alone = [
                    function.call([prompt], [completion], [row])
                    for prompt, completion, row in zip(prompts, completions, rows, strict=True)
                ]
                broken = [number for number, reward in enumerate(alone) if isinstance(reward, str)]
                if self.failure == "stop":
                    what = alone[broken[0]] if broken else rewards
                    raise RowError(
                        f"reward {function.name}: {what}: fix the function, or count such rows as 0 with "
                        "`reward_failure=zero`",
                        [rows[number].where for number in broken],
                    )
                failed += len(broken)
                rewards = [0.0 if isinstance(reward, str) else reward[0] for reward in alone]
            parts[function.name] = rewards
        weighted = [[function.weight * reward for reward in parts[function.name]] for function in self.functions]
        sums = [sum(rewards) for rewards in zip(*weighted, strict=True)]
        return RewardScores(sums, parts, failed)

    def close(self) -> None:
        """Stop the processes."""
        for function in self.functions:
            function.stop()


class _RewardProcess:
    """One reward function in a process, which is restarted after a timeout."""

    def __init__(self, name: str, weight: float, timeout: float) -> None:
        self.name, self.weight, self.timeout = name, weight, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def call(
        self, prompts: Sequence[Any], completions: Sequence[str], rows: Sequence[RewardRecord]
    ) -> list[float] | str:
        """The rewards, or an error message."""
        if self._process is None:
            self._start()
        request = {
            "prompts": list(prompts),
            "completions": list(completions),
            "rows": [dict(row.fields) for row in rows],
        }
        answer = self._exchange(json.dumps(request, default=str).encode() + b"\n", self.timeout)
        return answer["rewards"] if "rewards" in answer else str(answer["error"])

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        function = REWARDS.get(self.name, self.name)
        command = [sys.executable, "-m", "dlm_bridge.train.rl.reward_worker", function, str(os.getpid())]
        # The package may be importable only through this process's sys.path.
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH"), root])])
        with signals_blocked():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        answer = self._exchange(b"", START_TIMEOUT)
        if "ready" not in answer:
            self.stop()
            raise SettingError(
                "reward",
                f"{self.name} cannot be loaded ({answer.get('error', 'no answer')}): give package.module.name, "
                f"file.py:name, or one of {', '.join(REWARDS)}",
            )

    def _exchange(self, request: bytes, timeout: float) -> dict[str, Any]:
        """Send a line and read one within `timeout` seconds; a process that does not answer is killed."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline, received = time.monotonic() + timeout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if request:
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while not received.endswith(b"\n"):
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    self.stop()
                    return {"error": f"no answer in {timeout:g} s"}
                for key, _ in events:
                    if key.fileobj is process.stdin:
                        try:
                            request = request[os.write(process.stdin.fileno(), request) :]
                        except BrokenPipeError:
                            request = b""
                        if not request:
                            selector.unregister(process.stdin)
                    elif chunk := os.read(process.stdout.fileno(), 1 << 20):
                        received += chunk
                    else:
                        self.stop()
                        return {"error": "its process ended"}
        answer: dict[str, Any] = json.loads(received)
        return answer


def _weighted(name: str) -> tuple[str, float]:
    weight, star, rest = name.partition("*")
    if not star:
        return name, 1.0
    try:
        return rest, float(weight)
    except ValueError:
        raise SettingError("reward", f"{name}: the weight {weight!r} is not a number") from None


def load_function(path: str) -> Callable[..., Any]:
    """Import the function `package.module.name` or `file.py:name`. Raises ImportError, AttributeError, and whatever
    its module raises."""
    if ".py:" in path:
        file, _, name = path.rpartition(":")
        spec = importlib.util.spec_from_file_location("reward_functions", file)
        if spec is None or spec.loader is None or not os.path.isfile(file):
            raise ImportError(f"no file {file}")
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        place, _, name = path.rpartition(".")
        if not place:
            raise ImportError("neither a dotted path nor file.py:name")
        module = importlib.import_module(place)
    found: Callable[..., Any] = getattr(module, name)
    if not callable(found):
        raise AttributeError(f"{name} is not a function")
    return found


def answer_request(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    """The function's rewards for a request, or an error message."""
    try:
        rewards = [float(reward) for reward in function(request["prompts"], request["completions"], request["rows"])]
    except Exception as error:  # whatever a reward raises
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")}
    if len(rewards) != len(request["completions"]):
        wanted = counted(len(request["completions"]), "completion")
        return {"error": f"it gave {counted(len(rewards), 'reward')} for {wanted}"}
    if any(reward != reward or reward in (float("inf"), float("-inf")) for reward in rewards):
        return {"error": "it gave a reward that is not a finite number"}
    return {"rewards": rewards}


def main() -> None:
    end_with_parent(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM):  # these end the parent; processes of the function still get them
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a reward must not mix with the answers

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        function = load_function(sys.argv[1])
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        return
    reply({"ready": True})
    for line in sys.stdin:
        reply(answer_request(function, json.loads(line)))


if __name__ == "__main__":
    main()
