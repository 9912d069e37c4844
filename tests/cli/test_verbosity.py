"""`-v` and `-q`: which messages are printed beside a command's results, by level and origin."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from dlm_bridge import terminal

LEVELS = ("INFO", "WARNING", "ERROR")
# Levels that are printed, of loggers of this package and of others.
SHOWN = {
    ("quiet", "dlm_bridge.part"): ("ERROR",),
    ("quiet", "other"): ("ERROR",),
    ("normal", "dlm_bridge.part"): ("WARNING", "ERROR"),
    ("normal", "other"): ("ERROR",),
    ("verbose", "dlm_bridge.part"): ("INFO", "WARNING", "ERROR"),
    ("verbose", "other"): ("WARNING", "ERROR"),
}
# One process for all runs of a command; pytest's own handlers would take the log messages.
RUNS = """
import contextlib, io, json, sys
from dlm_bridge import terminal
from dlm_bridge.cli.app import main

terminal.silence_libraries()  # as the program's entry point does

found = []
for words in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["dlm-bridge", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""
WARNS = """
import warnings
from dlm_bridge import terminal

terminal.silence_libraries()
for module in ("dlm_bridge.part", "other"):
    warnings.warn_explicit("of " + module, UserWarning, "file.py", 1, module=module)
    warnings.warn_explicit("unclosed file", ResourceWarning, "file.py", 1, module=module)
"""


def run(code: str, *arguments: str, **variables: str) -> tuple[str, str]:
    """stdout and stderr of a process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | variables
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    return done.stdout, done.stderr


def test_levels_that_are_printed() -> None:
    code = (
        "import logging\n"
        "from dlm_bridge import terminal\n"
        f"for chosen in {('quiet', 'normal', 'verbose')}:\n"
        "    terminal.set_verbosity(chosen)\n"
        "    for name in ('dlm_bridge.part', 'other'):\n"
        f"        for level in {LEVELS}:\n"
        "            logging.getLogger(name).log(getattr(logging, level), f'{chosen} {name} {level}')\n"
    )
    _, err = run(code)
    assert err.split("\n")[:-1] == [" ".join((*key, level)) for key, levels in SHOWN.items() for level in levels]


def test_more_and_less_beside_a_command_s_results(llada: Path) -> None:
    words = ["generate", str(llada), "--prompt", "a", "--gen-length", "4"]
    given = [words, [*words, "-q"], [*words, "-v"], [*words, "-q", "-v"]]
    normal, quiet, verbose, both = json.loads(run(RUNS, json.dumps(given))[0])
    assert normal[:2] == quiet[:2] == verbose[:2]  # exit code and text
    assert (normal[0], quiet[2]) == (0, "")
    first, second = len(normal[2].splitlines()), len(verbose[2].splitlines())
    assert 0 < first < second
    assert (both[0], both[1], both[2].count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("variables", "shown"), [({}, ["dlm_bridge.part"]), ({"PYTHONWARNINGS": "default"}, ["dlm_bridge.part", "other"])]
)
def test_warnings_of_other_packages_are_hidden(variables: dict[str, str], shown: list[str]) -> None:
    """Unless the user has set Python's own filters."""
    _, err = run(WARNS, **variables)
    assert [name for name in ("dlm_bridge.part", "other") if f"of {name}" in err] == shown
    assert ("unclosed" in err) == (variables.get("PYTHONWARNINGS") == "default")


class _Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def _kept() -> Iterator[None]:
    """What `set_verbosity` changes in this process."""
    own, last = logging.getLogger("dlm_bridge"), logging.lastResort
    assert last is not None
    before = own.level, last.level, last.filters[:], terminal._verbosity[:]
    yield
    own.setLevel(before[0])
    last.setLevel(before[1])
    last.filters[:], terminal._verbosity[:] = before[2:]


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize(("verbosity", "is_terminal"), product(("quiet", "normal", "verbose"), (False, True)))
def test_the_line_while_a_model_loads(
    verbosity: terminal.Verbosity,
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", _Stream(is_terminal))
    terminal.set_verbosity(verbosity)
    with terminal.loading("outer-model"), terminal.loading("inner-model"):
        pass
    said = sys.stderr.getvalue()
    assert ("outer-model" in said) == (is_terminal and verbosity != "quiet")
    assert "inner-model" not in said  # a model that is loaded for another
    assert [record.levelname for record in caplog.records] == ["INFO"] * (2 if verbosity == "verbose" else 0)


def test_no_line_as_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", _Stream(True))
    monkeypatch.setattr(terminal, "_verbosity", [])
    with terminal.loading("a-model"):
        pass
    assert sys.stderr.getvalue() == ""
