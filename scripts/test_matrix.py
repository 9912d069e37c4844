"""A short suite of tests under one combination of Python, torch and transformers, in an environment of its own.

python scripts/test_matrix.py                                    lists the cells of the matrix
python scripts/test_matrix.py py3.12-torch2.13-transformers5.24  makes build/matrix/CELL and runs the suite there

Every torch from PyPI for Linux brings gigabytes of CUDA libraries; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/
whl/cpu (in one word) finds builds without them. An environment that is there is used again; --fresh makes it anew.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEWEST = "newest"
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.13", "2.15", NEWEST)
TRANSFORMERS = ("5.23", "5.24", NEWEST)
# What the suite needs beside the package: its own extra `dev` has linters, and libraries of other tests.
NEEDS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.130", "setuptools>=77")
SUITE = (
    "tests/test_package.py",
    "tests/cli/test_app.py",
    "tests/cli/test_help.py",
    "tests/families/test_families.py",
    "tests/convert/test_round_trip.py",
    "tests/generation/test_samplers.py",
    "tests/train/test_engine.py",
    "tests/train/test_trainer.py",
    "tests/parallel/test_megatron_run.py",
)


@dataclass(frozen=True)
class Cell:
    """One combination of versions."""

    python: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        return f"py{self.python}-torch{self.torch}-transformers{self.transformers}"

    def requirements(self) -> list[str]:
        """The package's own requirements and those of megatron-core, at this cell's versions whatever their bounds."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        chosen = {"torch": self.torch, "transformers": self.transformers}
        found = []
        for requirement in [*project["dependencies"], *project["optional-dependencies"]["megatron"], *NEEDS]:
            name = re.match(r"[\w.-]+", requirement)
            version = chosen.get(name.group()) if name else None
            if version is not None and name is not None:
                requirement = name.group() if version == NEWEST else f"{name.group()}=={version}.*"
            found.append(requirement)
        return found


CELLS = {cell.name: cell for cell in itertools.starmap(Cell, itertools.product(PYTHONS, TORCHES, TRANSFORMERS))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", nargs="?", metavar="CELL", choices=CELLS)
    parser.add_argument("--python", metavar="PATH", help="the interpreter, where pythonX.Y is not in PATH")
    parser.add_argument("--fresh", action="store_true", help="make the environment anew")
    options = parser.parse_args()
    if options.cell is None:
        print(*CELLS, sep="\n")
        print("one cell a call: make test-matrix CELL=...", file=sys.stderr)
        return 2
    cell = CELLS[options.cell]
    interpreter = find_interpreter(cell.python, options.python)
    if interpreter is None:
        print(f"no python{cell.python} in PATH runs: name one with --python PATH", file=sys.stderr)
        return 2
    python = install(cell, interpreter, ROOT / "build" / "matrix" / cell.name, options.fresh)
    return subprocess.run([python, "-m", "pytest", *SUITE], cwd=ROOT, check=False).returncode


def find_interpreter(version: str, given: str | None) -> str | None:
    """An interpreter of the version that runs; a shim that finds none is no interpreter."""
    path = given or shutil.which(f"python{version}")
    if path is None:
        return None
    code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    said = subprocess.run(
        [path, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    return path if said.returncode == 0 and said.stdout.strip() == version else None


def install(cell: Cell, interpreter: str, folder: Path, fresh: bool) -> str:
    """Make the cell's environment, with the package editable; its interpreter."""
    python, done = folder / "bin" / "python", folder / "installed"
    if fresh or not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *cell.requirements()], check=True)
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT], check=True)
        done.touch()
    code = (
        "import torch, transformers, sys; print(sys.version.split()[0], torch.__version__, transformers.__version__)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([python, "-c", code], env=environment, check=True)
    return str(python)


if __name__ == "__main__":
    raise SystemExit(main())
