"""Results of benchmarks/layouts/one_step.py and runs.py in a document: each of its rows is the newest that there is.

The document's own tables, between `<!-- gpu -->`, `<!-- runs -->` and their ends, are what was there before. Every row
names its launch by number; a list above the tables says when a launch was, on what, and how its ranks talked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.layouts.cells import Cell, layouts
from benchmarks.layouts.tables import figures
from dlm_bridge.errors import DlmBridgeError

CELLS = ("layout", "model, objective", "dtype", "result", "loss / gradient apart", "from fp32", "launch")
RUNS = ("run", "result", "what was seen", "launch")
Row = tuple[str, ...]


@dataclass
class Document:
    """What a document has of both: rows by what they are about, and the launches that they name by number."""

    text: str
    launches: list[str] = field(default_factory=list)
    cells: dict[Row, Row] = field(default_factory=dict)
    runs: dict[Row, Row] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Document:
        launches = [line.split(". ", 1)[1] for line in _lines(text, "launches") if line[:1].isdigit()]
        cells = {row[:2]: row for row in _rows(_lines(text, "gpu"))}
        return cls(text, launches, cells, {row[:1]: row for row in _rows(_lines(text, "runs"))})

    def add_cells(self, found: dict[str, Any]) -> None:
        """The cells of one file of benchmarks/layouts/one_step.py."""
        cells = [Cell(**cell) for cell in found["cells"] if cell["result"] != "not run"]
        for cell in cells:
            apart, from_fp32 = figures(cell)
            seen = apart or cell.said.replace("|", "/")
            key = (cell.layout, cell.task)
            self.cells[key] = (*key, cell.precision, cell.result, seen, from_fp32, self._launch(found))

    def add_runs(self, found: dict[str, Any]) -> None:
        """The runs of one file of benchmarks/layouts/runs.py."""
        for row in found["rows"]:
            said = row["said"].replace("|", "/")
            self.runs[row["name"],] = (row["name"], row["result"], said, self._launch(found))

    def written(self) -> str:
        """The document with all that is known, in the order of the benchmark's layouts."""
        wanted = {(layout.name, task.name): "" for layout in layouts() for task in layout.tasks}
        cells = [self.cells[key] for key in wanted if key in self.cells]
        numbered = [f"{number}. {launch}" for number, launch in enumerate(self.launches, 1)]
        missing: dict[str, list[str]] = {}
        for layout, task in (key for key in wanted if key not in self.cells):
            missing.setdefault(layout, []).append(task)
        left = "; ".join(f"`{layout}` ({', '.join(tasks)})" for layout, tasks in missing.items())
        text = _put(self.text, "launches", numbered)
        text = _put(text, "gpu", [*_table(CELLS, cells), "", f"Not run on GPUs: {left or 'none'}."])
        return _put(text, "runs", _table(RUNS, self.runs.values()))

    def _launch(self, found: dict[str, Any]) -> str:
        name = f"{found['date']}: {found['conditions']}."
        if name not in self.launches:
            self.launches.append(name)
        return str(self.launches.index(name) + 1)


def merge(document: Path, cells: Sequence[Path], runs: Sequence[Path]) -> None:
    """Write the results in `cells` and `runs` into a document; those of later files count."""
    merged = Document.read(document.read_text())
    for path in cells:
        merged.add_cells(json.loads(path.read_text()))
    for path in runs:
        merged.add_runs(json.loads(path.read_text()))
    document.write_text(merged.written())


def put_table(document: Path, name: str, head: Row, rows: Iterable[Row], above: str = "") -> None:
    """Write a table, below a line of text, between a name's marks."""
    lines = [above, ""] if above else []
    document.write_text(_put(document.read_text(), name, [*lines, *_table(head, rows)]))


def update_table(document: Path, name: str, head: Row, row: Row, keys: int) -> None:
    """Write a row into the table between a name's marks, in place of the one with the same first `keys` cells."""
    rows = {old[:keys]: old for old in _rows(_lines(document.read_text(), name))}
    put_table(document, name, head, (rows | {row[:keys]: row}).values())


def _ends(text: str, name: str) -> tuple[int, int]:
    """Where what is between a name's marks begins and ends."""
    first, last = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    begin, end = text.find(first), text.find(last)
    if not 0 <= begin < end:
        raise DlmBridgeError(
            None, f"the document has no lines {first.strip()} and {last}: put them where its table is to be"
        )
    return begin + len(first), end


def _lines(text: str, name: str) -> list[str]:
    begin, end = _ends(text, name)
    return text[begin:end].splitlines()


def _put(text: str, name: str, lines: Iterable[str]) -> str:
    begin, end = _ends(text, name)
    return text[:begin] + "\n" + "\n".join(lines) + "\n\n" + text[end:]


def _rows(lines: Iterable[str]) -> list[Row]:
    """Those of a table, without its head."""
    return [tuple(line[2:-2].split(" | ")) for line in lines if line.startswith("|")][2:]


def _table(head: Row, rows: Iterable[Row]) -> list[str]:
    return [_line(head), "|" + "---|" * len(head), *map(_line, rows)]


def _line(row: Row) -> str:
    return f"| {' | '.join(row)} |"
