"""What `layouts_runs.py` has seen of each run: a table in a file that outlives the processes, which some runs kill."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.layouts_table import conditions


@dataclass
class Row:
    name: str
    result: str  # holds, fails, error
    said: str
    seconds: float


class Log:
    """What is done, in a file that outlives the processes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.output, self.transport = options.output, options.transport
        self.path = self.output.with_name(self.output.name + ".json")
        self.now = self.output.with_name(self.output.name + ".now")
        self.rows: dict[str, Row] = {}
        self.began = time.time()
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        self.interrupted = ""
        if again:
            kept = json.loads(self.path.read_text()) if self.path.exists() else {"rows": [], "began": self.began}
            self.rows = {row["name"]: Row(**row) for row in kept["rows"]}
            self.began = kept["began"]
            self.interrupted = self.now.read_text() if self.now.exists() else ""
            said = sorted({path.read_text() for path in self._dead()})
            if said or (self.interrupted and "SIGKILL" not in self.interrupted):
                self.rows[self.interrupted] = Row(self.interrupted, "error", "; ".join(said) or "a process died", 0.0)
        elif os.environ["RANK"] == "0":
            self.output.parent.mkdir(parents=True, exist_ok=True)
            for path in (self.path, self.now, *self._dead()):
                path.unlink(missing_ok=True)

    def started(self, name: str) -> None:
        if dist.get_rank() == 0:
            for path in self._dead():
                path.unlink()
            self.now.write_text(name)

    def add(self, row: Row) -> None:
        self.rows[row.name] = row
        if dist.get_rank() == 0:
            print(_line(row), flush=True)
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
        return "\n".join([self.conditions(), "", head, *map(_line, self.rows.values()), ""])

    def _dead(self) -> list[Path]:
        return list(self.output.parent.glob(f"{self.output.name}.died.*"))


def _line(row: Row) -> str:
    return f"| {row.name} | {row.result} | {row.said.replace('|', '/')} | {row.seconds:.0f} |"
