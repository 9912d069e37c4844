"""`python -m tests.fuzz --cases 5000 --state FILE`: run commands on damaged inputs.

The state file keeps the next seed and the counts, so that a run which was stopped continues where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")

import typer.main

import dlm_bridge
from dlm_bridge.errors import DlmBridgeError
from tests import launcher
from tests.fuzz.inputs import KINDS
from tests.fuzz.runner import Case, Fuzzer

IMPORTED = ("bitsandbytes", "datasets.io.generator", "peft", "torch.utils.serialization")  # beside our own modules


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="number of cases in all, those before a stop included")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--state", type=Path, help="file of the next seed and the counts")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of inputs, separated by commas")
    parser.add_argument("--commands", default="", help="commands, such as serve,eval; all by default")
    parser.add_argument(
        "--hostile", choices=("quick", "all"), help="in place of random damage: a hostile pickle at every place"
    )
    parser.add_argument("--show", action="store_true", help="print every case, not only faults")
    parser.add_argument("--keep", type=Path, help="folder of the sound inputs, kept for the next run")
    options = parser.parse_args()
    state: dict[str, Any] = {"next": options.seed, "cases": 0, "codes": {}, "answers": {}, "faults": []}
    if options.state is not None and options.state.exists():
        state |= json.loads(options.state.read_text())
    _import()
    root = options.keep or Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        fuzzer = Fuzzer(root, tuple(options.kinds.split(",")), tuple(filter(None, options.commands.split(","))))
        for case in _cases(fuzzer, options, state):
            state["next"] += 1
            state["cases"] += 1
            state["codes"] = Counter(state["codes"]) + Counter([str(case.outcome.code)])
            state["answers"] = Counter(state["answers"]) + Counter(map(str, case.outcome.answers.values()))
            if case.faults:
                state["faults"].append([case.seed, case.kind, case.words[0], case.faults])
            if case.faults or options.show:
                tell(case)
            if options.state is not None:
                options.state.write_text(json.dumps(state))
    finally:
        if options.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    requests = f"requests: {_counts('answered with', state['answers'])}; " if state["answers"] else ""
    print(f"{state['cases']} cases: {_counts('ended with', state['codes'])}; {requests}{len(state['faults'])} faults")
    sys.exit(bool(state["faults"]))


def _cases(fuzzer: Fuzzer, options: argparse.Namespace, state: dict[str, Any]) -> Iterator[Case]:
    for kind in fuzzer.kinds if options.hostile else ():
        yield from fuzzer.hostile_cases(kind, options.hostile == "quick")
    while not options.hostile and state["cases"] < options.cases:
        yield fuzzer.run(state["next"])


def _import() -> None:
    """Import what the commands import when they run, so that forked processes share it."""
    launcher.import_all()
    own = [module.name for module in pkgutil.walk_packages(dlm_bridge.__path__, "dlm_bridge.", onerror=lambda _: None)]
    for module in (*IMPORTED, *(name for name in own if not name.endswith("__main__"))):
        with contextlib.suppress(ImportError, DlmBridgeError):  # an extra that is not installed
            importlib.import_module(module)
    from dlm_bridge.cli.app import app

    typer.main.get_command(app)
    gc.collect()
    gc.freeze()


def _counts(what: str, counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {what} {code}" for code, count in sorted(counts.items()))


def tell(case: Case) -> None:
    """Print a case, with the seed that runs it again."""
    outcome = case.outcome
    print(
        f"seed {case.seed} ({case.kind}), {outcome.seconds:.1f} s, exit code {outcome.code}: {'; '.join(case.faults)}"
    )
    print(ascii(f"  $ dlm-bridge {' '.join(case.words)}")[1:-1])
    for done in case.damage:
        print(ascii(f"  {done}")[1:-1])
    if outcome.answers:
        print(f"  answers: {_counts('with', Counter(outcome.answers.values()))}")
    for line in outcome.stderr.splitlines()[-(12 if case.faults else 2) :]:
        print(ascii(f"  | {line[:300]}")[1:-1])
    sys.stdout.flush()


if __name__ == "__main__":
    main()
