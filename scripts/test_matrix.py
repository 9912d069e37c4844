"""A short suite of tests under one combination of Python, megatron-core, torch and transformers, in an environment of
its own, with the newest TRL, PEFT and lm-eval that `pyproject.toml` allows.

python scripts/test_matrix.py                                             lists the cells of the matrix
python scripts/test_matrix.py py3.12-core0.19-torch2.13-transformers5.24  makes build/matrix/CELL, runs the suite there

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
PYTHONS = {"3.11": "0.16.1", "3.12": "0.19", "3.13": "0.19"}  # with what the extra `megatron` takes
TORCHES = ("2.11", "2.13", "2.15", NEWEST)
TRANSFORMERS = ("5.23", "5.24", NEWEST)
# Of the extra `dev`, which has linters too, and libraries of other tests; and what builds the package.
NEEDS = ("pytest", "pytest-timeout", "hypothesis", "trl", "lm-eval", "bitsandbytes")
BUILD = "setuptools>=77"
SUITE = (
    "tests/test_package.py",
    "tests/cli/test_app.py",
    "tests/cli/test_help.py",
    "tests/families/test_families.py",
    "tests/convert/test_round_trip.py",
    "tests/generation/test_samplers.py",
    "tests/train/test_engine.py",
    "tests/train/test_trainer.py",
    "tests/train/test_lora.py",
    "tests/train/test_trl.py",
    "tests/evaluation",
    "tests/parallel/test_megatron_run.py",
)


@dataclass(frozen=True)
class Cell:
    """One combination of versions."""

    python: str
    core: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        return f"py{self.python}-core{self.core}-torch{self.torch}-transformers{self.transformers}"

    def requirements(self) -> list[str]:
        """The package's own requirements and those of megatron-core, at this cell's versions whatever their bounds."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        needed = [text for text in extras["dev"] if _name(text) in NEEDS]
        chosen = {"torch": self.torch, "transformers": self.transformers, "megatron-core": self.core}
        found = []
        for requirement in [*project["dependencies"], *extras["megatron"], *needed, BUILD]:
            name = _name(requirement)
            if name in chosen:
                requirement = name if chosen[name] == NEWEST else f"{name}=={chosen[name]}.*"
            if requirement not in found:  # the extra has a line of megatron-core per Python
                found.append(requirement)
        return found


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


_PRODUCT = itertools.product(PYTHONS.items(), TORCHES, TRANSFORMERS)
_CELLS = [Cell(*python, torch, transformers) for python, torch, transformers in _PRODUCT]
_CELLS.append(Cell("3.12", "0.16.1", "2.13", "5.24"))  # which the extra `megatron` allows
CELLS = {cell.name: cell for cell in _CELLS}


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
