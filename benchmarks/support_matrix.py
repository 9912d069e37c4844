"""Which layouts train which objectives to one process's loss and gradients: run on CPU processes and printed.

    python benchmarks/support_matrix.py --json matrix.json
    python benchmarks/support_matrix.py --gpu layouts/cells*.json --runs layouts/runs*.json     GPUs', into docs

Every cell is a tiny model, dense or with experts, rows packed and not, cut over two or four gloo processes; it must
have the loss, the gradient norm, every gradient and the validation loss of one process to 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.layouts.document import merge  # noqa: E402
from tests.parallel.megatron_cases import EXPERTS_ONLY, LARGE, LAYOUTS, SUBJECTS, Files, cells, refusal  # noqa: E402
from tests.processes import OK, forked  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the cells there")
    parser.add_argument(
        "--gpu", type=Path, nargs="+", default=[], help="what benchmarks/layouts/one_step.py wrote on GPUs"
    )
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="what runs.py wrote there")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "support_matrix.md")
    options = parser.parse_args()
    if options.gpu or options.runs:
        merge(options.document, options.gpu, options.runs)
        return
    matrix = run()
    if options.json is not None:
        options.json.write_text(json.dumps(matrix, indent=2) + "\n")
    print(table(matrix))


def run() -> dict[str, dict[str, str]]:
    """matrix[subject][layout]: "equal", what the engine refuses it with, "differs", or "not run"."""
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder))
        files.write()
        for worker in ("megatron_worker", "megatron_layouts_worker"):
            command = [sys.executable, "-m", f"tests.parallel.{worker}", folder]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        said = {
            number: forked(files.root / f"world{number}", number) | forked(files.root / f"layouts{number}", number)
            for number in (2, 4)
        }
    matrix = {name: dict.fromkeys({**LAYOUTS, **LARGE}, "not run") for name in SUBJECTS}
    for name, layouts in matrix.items():
        if not SUBJECTS[name].experts:
            layouts |= dict.fromkeys(EXPERTS_ONLY, "the model is dense (it has no experts)")
    for number in (2, 4):
        for cell in cells(number):
            reached = said[number].get(str(cell), [])
            fine = reached == [OK] * number
            outcome = (refusal(cell) or "equal") if fine else "differs" if reached else "not run"
            before = matrix[cell.subject][cell.layout]
            matrix[cell.subject][cell.layout] = outcome if before in ("not run", outcome) else "differs"
    return matrix


def table(matrix: dict[str, dict[str, str]]) -> str:
    """Markdown: a row for each layout, a column for each model with its objective; refusals as notes below."""
    layouts = list(next(iter(matrix.values())))
    notes: list[str] = []
    lines = ["| layout | " + " | ".join(matrix) + " |", "|---" * (len(matrix) + 1) + "|"]
    for layout in layouts:
        row = []
        for cells_of in matrix.values():
            outcome = cells_of[layout]
            if outcome not in ("equal", "differs", "not run"):
                if outcome not in notes:
                    notes.append(outcome)
                outcome = f"refused ({notes.index(outcome) + 1})"
            row.append(outcome)
        lines.append(f"| {layout} | " + " | ".join(row) + " |")
    return "\n".join([*lines, "", *(f"({number}) {note}" for number, note in enumerate(notes, 1))])


if __name__ == "__main__":
    main()
