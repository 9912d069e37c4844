"""A stand-in for wandb, which needs an account and a network: it writes what it is given to a file."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CODE = """
import json

config = {}
KEY, FAILS = "k", None

def login():
    if KEY is None:
        raise ValueError("no API key")

class Run:
    def log(self, values, step=None, **_):
        if step == FAILS:
            raise ConnectionError("gone")
        write(step=step, **values)
    def finish(self): pass

def init(project, name, dir, config):
    write(project=project, name=name, steps=config["steps"])
    return Run()

def write(**values):
    with open(FILE, "a") as file:
        print(json.dumps(values), file=file)
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with a key: its KEY and FAILS (a step) can be set."""
    for variable in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "wandb.py").write_text(f"FILE = {str(tmp_path / 'logged.jsonl')!r}\n{CODE}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield importlib.import_module("wandb")
    monkeypatch.delitem(sys.modules, "wandb")


def logged(module: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What `init` and each call of `log` were given."""
    first, *steps = map(json.loads, Path(module.FILE).read_text().splitlines())
    return first, steps
