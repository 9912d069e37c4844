"""A few cases of the fuzzer in every run, more in the slow ones; `make fuzz` runs thousands."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer.main

from dlm_bridge.cli.app import app
from dlm_bridge.registration import EXTENSIONS
from tests import launcher
from tests.fuzz import hostile
from tests.fuzz.inputs import KINDS, RESTORES
from tests.fuzz.runner import Case, Outcome, faults

QUICK = "diffusion,llama,pickled,torch_dist"  # sound ones are made in no time


def fuzz(folder: Path, cases: int, *arguments: str) -> dict[str, Any]:
    """Run `cases` in all, forked from the launcher; the state that is left."""
    log, state = folder / "log", folder / "state.json"
    words = ["--cases", str(cases), "--state", str(state), "--keep", str(folder / "inputs"), *arguments]
    whole = launcher.run("tests.fuzz", words, [dict(os.environ)], [log], 900)
    assert whole, log.read_text()
    found: dict[str, Any] = json.loads(state.read_text())
    return found


def test_damaged_inputs_end_in_one_line(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 4, "--kinds", QUICK)["next"] == 4
    state = fuzz(tmp_path, 8, "--kinds", QUICK)  # goes on where it was
    assert (state["next"], state["cases"]) == (8, 8)


@pytest.mark.extension(*EXTENSIONS)
def test_every_command_has_its_words() -> None:
    """But those that read no input, and transformers' own."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    run = {words[0] for kind in KINDS.values() for words in kind.commands}
    assert run == set(commands) - {"env", "families", "transformers"}


@pytest.mark.extension("serving")
def test_damaged_requests_are_answered(tmp_path: Path) -> None:
    state = fuzz(tmp_path, 2, "--kinds", "damaged_requests")
    assert state["codes"] == {"130": 2}
    assert set(state["answers"]) == {"200", "400"}


@pytest.mark.parametrize("what", ["archive", "metadata", "bytes", hostile.WHOLE])
def test_the_hostile_code_runs_where_a_reader_lets_it(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "it"
    dcp.save({"weight": torch.ones(2), "steps": 3}, checkpoint_id=folder, no_dist=True)
    torch.save({"steps": 3}, folder / "state.pt")
    file = hostile.METADATA if what in ("metadata", "bytes") else "state.pt"
    hostile.put(folder, hostile.Place(file, what), hostile.CODE)
    if file == "state.pt":
        with contextlib.suppress(RuntimeError):  # no archive, but it has run
            torch.load(folder / file, weights_only=False)
    else:
        dcp.load({"weight": torch.zeros(2), "steps": 0}, checkpoint_id=folder, no_dist=True)
    assert (tmp_path / hostile.MARKER).is_dir()


def walk_hostile(folder: Path, kinds: Iterable[str], how: str) -> dict[str, Any]:
    return fuzz(folder, 0, "--kinds", ",".join(kinds), "--hostile", how)


@pytest.mark.slow
@pytest.mark.extension("parallel")
def test_hostile_pickles_of_runs_and_checkpoints_never_run(tmp_path: Path) -> None:
    state = walk_hostile(tmp_path, ("pickled", "torch_dist", "run_sharded", "run_megatron"), "quick")
    assert state["cases"] >= 24
    assert state["codes"]["2"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", RESTORES)
def test_hostile_pickles_never_run(tmp_path: Path, kind: str) -> None:
    """At every place of a folder, under all commands."""
    assert walk_hostile(tmp_path, (kind,), "all")["cases"] >= 10


@pytest.mark.slow
def test_many_damaged_inputs_end_in_one_line(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 200, "--seed", "100")["cases"] == 200


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("hangs", Outcome(None, "", "", 120)),
        ("ends with -6", Outcome(-6, "", "aborted", 1)),
        ("traceback", Outcome(2, "", "Traceback (most recent call last):", 1)),
        ("control character '\\x1b' on stderr", Outcome(2, "", "dlm-bridge: \x1b[2J", 1)),
        ("control character '\\x1b' on stdout", Outcome(0, "\x1b[2J", "", 1)),
        ("7 lines, 13 characters on stderr", Outcome(2, "", "\n".join("abcdefg"), 1)),
        ("exit code 2 without a word", Outcome(2, "", "", 1)),
        ("exit code 2 without a word", Outcome(2, "", "100%|##| 2/2 [00:00<00:00, 1546.86it/s]\n", 1)),
        ("ends with 130", Outcome(130, "", "interrupted", 1)),
        ("answers 500 to commits.json", Outcome(2, "", "dlm-bridge: no", 1, {"commits.json": 500, "a.json": 400})),
        ("exit code 0 though weights are missing or truncated", Outcome(0, "", "", 1)),
    ],
)
def test_what_counts_as_a_fault(fault: str, outcome: Outcome) -> None:
    words = ("verify", "{it}")
    damage = ["truncate model.safetensors: 10 of 20 bytes"]
    assert faults(Case(0, "llama", words, damage, outcome), words)[0] == fault
    sound = Outcome(2, "", "dlm-bridge: model.safetensors: not whole", 1)
    assert faults(Case(0, "llama", words, damage, sound), words) == []
