"""Results in files that outlive a process: the cells of one_step.py, the runs of runs.py. Some of both end it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.layouts.cells import Cell, Layout, Task, layouts

FIGURES = ("loss / gradient apart", "bf16 from fp32: layout / one process")
PATIENCE_S = 60  # how long a process waits for the others at the beginning and the end of a cell


class CellTable:
    """The cells, kept in OUTPUT.json so that a process that is started again knows what is done."""

    def __init__(self, output: Path, world: int, patterns: Sequence[str], transport: str = "direct") -> None:
        self.output, self.patterns, self.transport = output, patterns, transport
        self.world = world
        self.path = output.with_name(output.name + ".json")
        self.begun = output.with_name(output.name + ".begun")
        self.cells: dict[tuple[str, str], Cell] = {}
        self.of: dict[tuple[str, str], tuple[Layout, Task]] = {}
        for layout in layouts():
            for task in layout.tasks:
                key = (layout.name, task.name)
                cell = Cell(layout.name, world, task.name, "")
                if world % layout.ranks:
                    cell.said = f"needs {layout.ranks} processes"
                elif self._place(key) == len(patterns):
                    cell.said = "left out by --cells"
                self.cells[key], self.of[key] = cell, (layout, task)

    def begin(self) -> None:
        """Start anew, or after a restart by the launcher note what took the processes down."""
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if not again:
            for path in (self.path, self.begun, *self.output.parent.glob(f"{self.output.name}.died.*")):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.output.with_name(self.output.name + ".work"), ignore_errors=True)
            _replace(self.begun, json.dumps({"at": time.time(), "by": _launch()}))
            return
        self._read()
        begun = json.loads(self.begun.read_text())
        key = tuple(begun.get("cell", ()))
        if key in self.cells and self.cells[key].result == "not run":
            said = [path.read_text() for path in sorted(self.output.parent.glob(f"{self.output.name}.died.*"))]
            cell = self.cells[key]
            cell.result, cell.said = "error", "; ".join(dict.fromkeys(said)) or "a process died"
            cell.precision = begun.get("precision", "")
            self.add(cell)
        _replace(self.begun, json.dumps({"at": begun["at"], "by": _launch()}))

    def wait(self) -> None:
        """Until rank 0 has begun."""
        deadline = time.time() + PATIENCE_S
        while time.time() < deadline:
            if self.begun.exists() and json.loads(self.begun.read_text()).get("by") == _launch():
                return
            time.sleep(0.05)
        raise SystemExit("rank 0 did not begin")

    def waiting(self) -> list[tuple[Layout, Task, Cell]]:
        """What is still to be run, in the order of the patterns, layout by layout. Every process asks."""
        self._read()
        left = [key for key, cell in self.cells.items() if cell.result == "not run" and not cell.said]
        return [(*self.of[key], self.cells[key]) for key in sorted(left, key=self._place)]

    def began(self) -> float:
        return float(json.loads(self.begun.read_text())["at"])

    def started(self, cell: Cell) -> None:
        key = (cell.layout, cell.task)
        text = json.dumps({"at": self.began(), "by": _launch(), "cell": key, "precision": cell.precision})
        _replace(self.begun, text)
        for path in self.output.parent.glob(f"{self.output.name}.died.*"):
            path.unlink()

    def died(self, cell: Cell, said: str) -> None:
        self.output.with_name(f"{self.output.name}.died.{os.environ['RANK']}").write_text(said)
        print(f"rank {os.environ['RANK']}: {cell.layout}: {cell.task}: {said}", file=sys.stderr, flush=True)

    def add(self, cell: Cell) -> None:
        self.cells[cell.layout, cell.task] = cell
        self.write()

    def write(self) -> None:
        _replace(
            self.path,
            json.dumps(
                {
                    "conditions": self.conditions(),
                    "date": time.strftime("%-d %B %Y", time.gmtime(self.began())),
                    "cells": [asdict(c) for c in self.cells.values()],
                }
            ),
        )
        _replace(self.output.with_name(self.output.name + ".md"), self.markdown())

    def line(self, cell: Cell) -> str:
        tolerance = ""
        if cell.tolerance is not None:
            loss, second = cell.tolerance
            tolerance = f"{loss:.0e} / {f'{second:.0e}' if cell.from_fp32 is None else f'{second} x'}"
        said = cell.said or (f"worst: {cell.worst}" if cell.result == "differs" else "")
        cells = (
            cell.layout,
            cell.task,
            cell.precision,
            cell.result,
            *figures(cell),
            tolerance,
            said.replace("|", "/"),
        )
        return "| " + " | ".join(cells) + " |"

    def markdown(self) -> str:
        head = ("layout", "model, objective", "dtype", "result", *FIGURES, "tolerance", "")
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        asked = [cell for cell in self.cells.values() if cell.result != "not run" or not cell.said]
        lines += [self.line(cell) for cell in asked]
        counts = {
            kind: sum(cell.result == kind for cell in asked)
            for kind in ("equal", "differs", "refused", "error", "not run")
        }
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return f"{self.conditions()}\n\n{summary}\n\n" + "\n".join(lines) + "\n"

    def conditions(self) -> str:
        """What it ran on, and how the ranks talked."""
        from dlm_bridge.parallel import platform

        through = platform.current().backend
        if self.transport == "host":
            through = "messages through the host's memory and gloo"
        return f"{self.world} ranks on {conditions()}, {through}"

    def _place(self, key: tuple[str, str]) -> int:
        """The number of the first pattern that a cell matches."""
        found = (number for number, pattern in enumerate(self.patterns) if re.search(pattern, ": ".join(key)))
        return next(found, len(self.patterns))

    def _read(self) -> None:
        if not self.path.exists():
            return
        for found in json.loads(self.path.read_text())["cells"]:
            key = (found["layout"], found["task"])
            if key in self.cells and found["result"] != "not run":
                self.cells[key] = Cell(**found)


@dataclass
class RunResult:
    name: str
    result: str  # holds, fails, error
    said: str
    seconds: float


class RunLog:
    """What is done, in a file that outlives the processes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.output, self.transport = options.output, options.transport
        self.path = self.output.with_name(self.output.name + ".json")
        self.now = self.output.with_name(self.output.name + ".now")
        self.planned = self.output.with_name(self.output.name + ".killed")
        self.rows: dict[str, RunResult] = {}
        self.began = time.time()
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        self.interrupted = ""
        if again:
            kept = json.loads(self.path.read_text()) if self.path.exists() else {"rows": [], "began": self.began}
            self.rows = {row["name"]: RunResult(**row) for row in kept["rows"]}
            self.began = kept["began"]
            self.interrupted = self.now.read_text() if self.now.exists() else ""
            said = sorted({path.read_text() for path in self._dead()})
            if (said or self.interrupted) and not self.planned.exists():
                self.rows[self.interrupted] = RunResult(
                    self.interrupted, "error", "; ".join(said) or "a process died", 0.0
                )
        elif os.environ["RANK"] == "0":
            self.output.parent.mkdir(parents=True, exist_ok=True)
            for path in (self.path, self.now, self.planned, *self._dead()):
                path.unlink(missing_ok=True)

    def kills(self) -> None:
        """The check that is under way kills its processes, and goes on when they are started again."""
        self.planned.touch()

    def started(self, name: str) -> None:
        if dist.get_rank() == 0:
            for path in (self.planned, *self._dead()):
                path.unlink(missing_ok=True)
            self.now.write_text(name)

    def add(self, row: RunResult) -> None:
        self.rows[row.name] = row
        self.interrupted = ""  # what a start of the processes goes on with is its first
        if dist.get_rank() == 0:
            print(_run_line(row), flush=True)
            rows = [asdict(row) for row in self.rows.values()]
            date = time.strftime("%-d %B %Y", time.gmtime(self.began))
            kept = {"conditions": self.conditions(), "date": date, "began": self.began, "rows": rows}
            self.path.write_text(json.dumps(kept))
            self.output.with_name(self.output.name + ".md").write_text(self.markdown())

    def died(self, name: str, said: str) -> None:
        print(f"rank {os.environ['RANK']}: {name}: {said}", file=sys.stderr, flush=True)
        self.output.with_name(f"{self.output.name}.died.{os.environ['RANK']}").write_text(said)

    def conditions(self) -> str:
        through = "" if self.transport == "direct" else ", messages through the host's memory and gloo"
        return f"{os.environ['WORLD_SIZE']} ranks on {conditions()}{through}"

    def markdown(self) -> str:
        head = "| run | result | what was seen | seconds |\n|---|---|---|---|"
        return "\n".join([self.conditions(), "", head, *map(_run_line, self.rows.values()), ""])

    def _dead(self) -> list[Path]:
        return list(self.output.parent.glob(f"{self.output.name}.died.*"))


def figures(cell: Cell) -> tuple[str, str]:
    """What is under FIGURES."""
    apart = "" if cell.gradient is None else f"{cell.loss:.1e} / {cell.gradient:.1e}"
    if cell.from_fp32 is None:
        return apart, ""
    return apart, f"{cell.from_fp32:.1e} / {cell.alone_from_fp32:.1e} ({cell.farther:.1f} x)"


def conditions(packages: Sequence[str] = ("torch", "megatron-core", "transformer-engine")) -> str:
    """What it ran on: devices, and the versions of those packages that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    from dlm_bridge.parallel import platform

    def of(name: str) -> Iterator[str]:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            return

    found = [text for name in packages for text in of(name)]
    chosen = platform.current()
    count = 1 if chosen.name == "cpu" else chosen.device_count()
    return f"{count} x {chosen.device_name()}, {', '.join(found)}"


def _launch() -> str:
    """What the processes of one start by the launcher have in common."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    return " ".join(os.environ.get(name, "") for name in names)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)


def _run_line(row: RunResult) -> str:
    return f"| {row.name} | {row.result} | {row.said.replace('|', '/')} | {row.seconds:.0f} |"
