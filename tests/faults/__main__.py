"""`python -m tests.faults --rounds 100 --state FILE`: random faults of runs of eight processes, as many as asked for.

The state file has the counts, the failures and the next seed, so that a run which was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DLM_BRIDGE_PLATFORM", "cpu")

import pytest

from tests.faults.chain import ENGINES, Chain, FaultError, arguments_of, reference_losses, write_inputs
from tests.train.conftest import undrawn


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="rounds in all, those before a stop included")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--state", type=Path, help="where to go on, and the counts")
    options = parser.parse_args()
    state = {"chains": 0, "finished": 0} | read_state(options.state, options.seed)
    import_engines()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ranks and disks are left by none
    failures = run_rounds(state, options.rounds, options.processes, options.engines.split(","), options.state)
    print(f"{state['rounds']} rounds, {state['finished']} runs to their end, {state['faults']}, {failures} failures")
    sys.exit(1 if state["failures"] else 0)


def import_engines() -> None:
    """What the ranks are forked with."""
    import torch

    torch.set_num_threads(1)
    undrawn(pytest.MonkeyPatch())
    gc.collect()
    gc.freeze()


def run_rounds(state: dict[str, Any], rounds: int, processes: int, engines: list[str], path: Path | None) -> int:
    """Rounds until the state counts so many; the number of failures."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        root = Path(folder)
        files = write_inputs(root / "inputs")
        references: dict[str, Any] = {}
        while state["rounds"] < rounds:
            engine = engines[state["chains"] % len(engines)]
            layout = engine.split()[0]  # whose losses are the same, however they are saved
            if layout not in references:
                references[layout] = reference_losses(files, layout, processes, root / layout)
            chain = Chain(engine, processes, root / "chain", references[layout])
            finished = False
            try:
                while not finished and state["rounds"] < rounds:
                    began = time.monotonic()
                    kind, finished = chain.round(arguments_of(files, engine), state["next"])
                    print(f"seed {state['next']}: {engine}, {kind}: {time.monotonic() - began:.0f} s", flush=True)
                    state["finished"] += finished
                    count(state, f"{engine}: {kind}", path)
            except FaultError as error:
                state["failures"].append({"seed": state["next"], "said": str(error)})
                print(f"seed {state['next']}: FAILED: {error}", flush=True)
                count(state, f"{engine}: failed", path)
            finally:
                chain.close()
            state["chains"] += 1
    return len(state["failures"])


def read_state(path: Path | None, seed: int) -> dict[str, Any]:
    """The state of rounds that were stopped, or a new one, whose first seed is given."""
    state: dict[str, Any] = {"next": seed, "rounds": 0, "faults": {}, "failures": []}
    return json.loads(path.read_text()) if path is not None and path.exists() else state


def count(state: dict[str, Any], kind: str, path: Path | None) -> None:
    """Add a round to the state, and write it."""
    state["next"] += 1
    state["rounds"] += 1
    state["faults"] = dict(Counter(state["faults"]) + Counter([kind]))
    if path is not None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(state, indent=1))
        os.replace(temporary, path)


if __name__ == "__main__":
    main()
