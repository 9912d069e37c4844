"""`python -m tests.nodes --rounds 30 --state FILE`: accidents of runs on two nodes, as many as asked for.

The state file has the counts, the failures and the next seed, so that a run which was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.__main__ import count, read_state
from tests.faults.chain import FaultError
from tests.nodes.accidents import DISK_FULL, KINDS, SLURM_KINDS, Accidents
from tests.nodes.network import Network, unavailable
from tests.nodes.slurm import no_slurm
from tests.parallel.megatron_cases import Files


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.nodes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="rounds in all, those before a stop included")
    parser.add_argument("--kinds", help="some of them, with commas between")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--state", type=Path, help="where to go on, and the counts")
    options = parser.parse_args()
    if reason := unavailable():
        print(f"no rounds of accidents: {reason}")
        return
    kinds = KINDS
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        print("no rounds with a full disk: no nvidia-resiliency-ext")
        kinds = tuple(kind for kind in kinds if kind != DISK_FULL)
    if reason := no_slurm(munge=True):
        print(f"no rounds under Slurm: {reason}")
    else:
        kinds += SLURM_KINDS
    if options.kinds:
        kinds = tuple(options.kinds.split(","))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nodes are left by none
    state = read_state(options.state, options.seed)
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder, Network(Path(folder) / "net") as network:
        files = Files(Path(folder) / "inputs").write_some("masked")
        accidents = Accidents(network, files, Path(folder))
        while state["rounds"] < options.rounds:
            kind, began = kinds[state["next"] % len(kinds)], time.monotonic()
            try:
                said = accidents.round(kind, state["next"])
            except FaultError as error:
                said = f"FAILED: {error}"
                state["failures"].append({"seed": state["next"], "said": str(error)})
            print(f"seed {state['next']}: {kind}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
            count(state, f"{kind}, failed" if said.startswith("FAILED") else kind, options.state)
    print("\n| accident | rounds |\n|---|---|")
    for kind, number in sorted(state["faults"].items()):
        print(f"| {kind} | {number} |")
    print(f"\n{state['rounds']} rounds, {len(state['failures'])} failures")
    sys.exit(1 if state["failures"] else 0)


if __name__ == "__main__":
    main()
