"""The environment in which a checkpoint's original code runs: a virtual environment of its own, and a subprocess.

A virtual environment is no sandbox: what runs there can do whatever the user can. It gets neither the Hub's token nor
this process's environment variables, a home folder of its own, and no way to fetch further code from the Hub.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlm_bridge.errors import DlmBridgeError, printable
from dlm_bridge.hub import CONFIG_FILE, check_plain_files, read_json
from dlm_bridge.processes import temporary_folder

RUNNER = Path(__file__).with_name("original_runner.py")
READY = "requirements.json"  # written last: an environment without it was interrupted
PASSED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "OMP_NUM_THREADS", "SYSTEMROOT")
_SHOWN = 3  # lines of what a failed process has said


def cache_folder() -> Path:
    """Where the environments are kept: below XDG_CACHE_HOME, by default ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dlm_bridge" / "original"


def make_environment(requirements: Sequence[str], folder: Path | None = None, pip_options: Sequence[str] = ()) -> Path:
    """The interpreter of a virtual environment with `requirements`, which is made where there is none yet.

    Keyed by the requirements and this interpreter's version. Raises DlmBridgeError where pip cannot install them.
    """
    wanted = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "requirements": sorted(requirements)}
    key = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]
    place = (folder or cache_folder()) / key
    python = place / "bin" / "python"
    place.parent.mkdir(parents=True, exist_ok=True)
    with _locked(place.with_name(f"{key}.lock")):
        if (place / READY).is_file() and python.exists():
            return python
        shutil.rmtree(place, ignore_errors=True)
        _check_run([sys.executable, "-m", "venv", str(place)], f"{place}: no virtual environment could be made")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pip_options]
        _check_run([*pip, *requirements], f"pip cannot install {' '.join(requirements)}")
        (place / READY).write_text(json.dumps(wanted, indent=2) + "\n")
    return python


def run_original(python: Path, checkpoint: Path, request: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """result.json's dict and the logits [1, S, V] that the checkpoint's own code computes under `python`.

    Raises DlmBridgeError where it fails, with the last lines that it said.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with temporary_folder("dlm-bridge-original-") as folder:
        (folder / "home").mkdir()
        (folder / "request.json").write_text(json.dumps({"checkpoint": str(checkpoint.absolute()), **request}))
        command = [str(python), "-I", str(RUNNER), str(folder)]
        what = f"{checkpoint}: its original code failed under {python}"
        _check_run(command, what, environment=_environment(folder / "home"))
        try:
            check_plain_files(folder)
            return read_json(folder / "result.json"), load_file(folder / "logits.safetensors")["logits"]
        except (OSError, SafetensorError, KeyError) as error:
            raise DlmBridgeError(f"{what}: it left no whole result: {error}") from None


def code_files(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every Python file that running the checkpoint's code may execute. Raises DlmBridgeError where its
    config.json names no code, or code of another repository."""
    where = checkpoint / CONFIG_FILE
    auto_map = read_json(where).get("auto_map")
    if not isinstance(auto_map, dict) or not auto_map:
        raise DlmBridgeError(f"{where}: it has no auto_map, so there is no original code to compare with")
    for reference in auto_map.values():
        text = str(reference)
        if "--" in text:
            raise DlmBridgeError(
                f"{where}: auto_map names code of another repository, {text}: copy it beside config.json and name it "
                "without the repository"
            )
    return {
        str(file.relative_to(checkpoint)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(checkpoint.rglob("*.py"))
        if file.is_file()
    }


def _environment(home: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {**kept, "HOME": str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_run(command: Sequence[str], what: str, environment: dict[str, str] | None = None) -> None:
    """Run a command to its end. Raises DlmBridgeError with the last lines of its output where it fails."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
    except OSError as error:
        raise DlmBridgeError(f"{command[0]}: cannot be started: {error.strerror}") from None
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            said = process.stdout.read().decode("utf-8", "replace")  # standard input stays open until it has ended
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    if code != 0:
        lines = [line.strip() for line in said.splitlines() if line.strip()][-_SHOWN:]
        raise DlmBridgeError(f"{what} (exit code {code}): {printable(' | '.join(lines))}")
