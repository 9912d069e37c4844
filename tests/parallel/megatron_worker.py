"""The processes that the Megatron engine's checks run in, all forked from one that has imported megatron-core.

python -m tests.parallel.megatron_worker FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.megatron_cases import STEPS, Cell, Files, cells
from tests.processes import fork, forked, launch

WORLDS = (1, 2, 4)
# Adam's steps of gradients that are next to nothing are noise, but for an epsilon that is larger than they are.
EXPERTS = {"subject": "masked-moe", "steps": 6, "adam_eps": 1e-3}
PREDICTED = {"subject": "predicting", "from_scratch": False, "steps": 4, "adam_eps": 1e-3, "save_interval": 2}
LATENT = {"subject": "latent", "steps": 4, "adam_eps": 1e-3, "save_interval": 2, "eval_interval": 2}
SINKS = {"subject": "sinks", "steps": 4, "adam_eps": 1e-3, "save_interval": 2, "eval_interval": 2}
DENSE = {"subject": "masked", "steps": 4, "adam_eps": 1e-3, "save_interval": 2, "eval_interval": 2}
IMPORTED = Cell("masked", False, "one")
Recomputed = tuple[tuple[Cell, str, str, dict[str, Any]], ...]
RECOMPUTED: Recomputed = (
    (Cell("scaled-queries", True, "tp2-sp"), "layers", "full", {}),
    (Cell("predicting", True, "pp2"), "layers", "full", {}),
    (Cell("latent", True, "tp2-sp"), "heads", "selective", {"recompute_modules": "mla_up_proj"}),
)
# Two micro-batches at a time: shared experts and a dense layer, packed rows; and interleaved stages.
OVERLAPPED: dict[int, tuple[tuple[Cell, dict[str, Any]], ...]] = {
    1: (),
    2: ((Cell("balanced-moe", True, "ep2"), {}),),
    4: ((Cell("masked-moe", False, "ep2-pp2"), {"vp": 2}),),
}

Plan = dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]
Results = dict[int, dict[str, list[str]]]  # what each rank reported, by the number of processes and the check


def plan(processes: int, root: Path = Path()) -> Plan:
    """Every check on so many processes, in order: its name, the function of `megatron_checks` and its arguments."""
    if processes == 1:
        return _alone() | bad_input(Files(root), 1)
    found = layouts(processes, quick=True) | _overlapped(processes)
    return found | _two(Files(root)) | bad_input(Files(root), 2) if processes == 2 else found


def layouts(processes: int, quick: bool) -> Plan:
    """The quick cells on so many processes, or the others; on one, what they are compared with."""
    if processes > 1:
        return {str(cell): ("equals_one_process", (cell,), {}) for cell in cells(processes, quick)}
    rows = {(cell.subject, cell.packed) for number in (2, 4) for cell in cells(number, quick)}
    if quick:
        overlapped = [cell for chosen in OVERLAPPED.values() for cell, _ in chosen]
        rows |= {(cell.subject, cell.packed) for cell in (IMPORTED, *overlapped, *(cell for cell, *_ in RECOMPUTED))}
    return {
        f"one process: {subject}{' packed' * packed}": ("writes_reference", (Cell(subject, packed, "one"),), {})
        for subject, packed in sorted(rows)
    }


def _alone() -> Plan:
    found = layouts(1, quick=True)
    blocks = {"block_schedule": "0:4,3:8", "mask_token_id": 98, "steps": 4, "save_interval": 2}
    return found | {
        "imported": ("starts_from_an_imported_checkpoint", (IMPORTED,), {}),
        "whole": ("trains", ("whole",), {}),
        "causal": ("trains", ("causal",), {"subject": "causal", "steps": 6}),
        "prediction": ("trains", ("predicted",), PREDICTED),
        "samples at one": ("samples_as_one_process", ("one",), {}),
        "blocks": ("trains", ("blocks",), {"subject": "block", **blocks}),
        "validation noise": ("evaluates_with_the_same_noise", (), {}),
        "finished": ("resumes_a_finished_run", ("whole",), {}),
        "early": ("starts_again_before_the_first_checkpoint", (), {}),
    }


def _overlapped(processes: int) -> Plan:
    return {
        f"{cell}{''.join(f' {name} {value}' for name, value in changes.items())}, two micro-batches at a time": (
            "overlaps_expert_communication",
            (cell,),
            changes,
        )
        for cell, changes in OVERLAPPED[processes]
    }


def _two(files: Files) -> Plan:
    resumed = "resumes_as_if_nothing_had_been"
    crashed = {"name": "crashed", "step": 8, "layout": "dp2"}
    terminated = {"name": "terminated", "step": 5, "layout": "pp2-vp2", "save_steps": "3", "keep_last": 2}
    predicting = {
        "subject": "causal-moe",
        "model": str(files.predicting),
        "from_scratch": False,
        "save_interval": 1,
        "keep_last": 1,
        "async_save": True,
        "mtp_loss_scaling_factor": 0.0,
    }
    return {
        "prediction layers": ("trains", ("predicting",), {**predicting, "layout": "ep2", "steps": 2}),
        "prediction layers, resumed": (
            "trains",
            ("predicting", True),
            {**predicting, "layout": "pp2", "steps": 4},
        ),
        **{
            f"masters {cell}{' unsharded' * (not sharded)}": (
                "masters_are_as_stored",
                (cell,),
                {"distributed_optimizer": sharded},
            )
            for cell, sharded in (
                (Cell("masked", False, "tp2-sp"), False),
                (Cell("block-moe", False, "ep2"), True),
            )
        },
        "samples at pp2-vp2": ("samples_as_one_process", ("pp2-vp2",), {}),
        "killed at tp2-sp, then pp2": (resumed, ("killed",), {"layout": "pp2"}),
        **_recomputed(RECOMPUTED),
        "prediction stops": ("trains", ("predicted-cut",), {**PREDICTED, "layout": "ep2", "steps": 2}),
        "prediction, ep2 then pp2": (resumed, ("predicted-cut", "predicted"), {**PREDICTED, "layout": "pp2"}),
        "crashed in a save": ("crashes_while_a_save_is_written", (), crashed),
        "crashed, then tp2-sp": (resumed, ("crashed",), {"layout": "tp2-sp"}),
        "terminated": ("saves_when_terminated", (), {**terminated, "kept": (4, 6)}),
        "terminated, then pp2": (resumed, ("terminated",), {"layout": "pp2", "keep_last": 2}),
        "the last two are kept": ("checkpoints_are", ("terminated", (STEPS - 4, STEPS)), {}),
    }


def _recomputed(cases: Recomputed) -> Plan:
    return {
        f"{cell} computed again: {modules}": ("equals_one_process", (cell,), {"recompute": how, **options})
        for cell, modules, how, options in cases
    }


def more_runs(processes: int) -> Plan:
    """Checks that repeat with other models and layouts what `plan` has shown, after the quick plan's `layouts` are
    done with one process."""
    resumed = "resumes_as_if_nothing_had_been"
    plain = {**EXPERTS, "distributed_optimizer": False}
    if processes == 1:
        return {
            "experts": ("trains", ("experts",), EXPERTS),
            "dense": ("trains", ("dense",), DENSE),
            "latent attention": ("trains", ("latent",), LATENT),
            "sinks": ("trains", ("sinks",), SINKS),
            "experts stop": ("trains", ("experts-alone",), {**EXPERTS, "steps": 3}),
            "experts stop, unsharded": ("trains", ("experts-plain",), {**plain, "steps": 3}),
            "samples at one": ("samples_as_one_process", ("one",), {}),
        }
    if processes == 4:
        options = {**EXPERTS, "layout": "ep2-pp2"}
        return {
            "experts, ep2 then ep2-pp2": (resumed, ("experts-cut", "experts"), options),
            "dense, tp2-sp then tp2-sp-pp2": (resumed, ("dense-cut", "dense"), {**DENSE, "layout": "tp2-sp-pp2"}),
        }
    return {
        f"masters {cell}": ("masters_are_as_stored", (cell,), {"distributed_optimizer": True})
        for cell in (Cell("masked", False, "dp2"), Cell("masked-tied", False, "pp2"))
    } | {
        "samples at tp2-sp": ("samples_as_one_process", ("tp2-sp",), {}),
        **_recomputed(((Cell("latent", True, "pp2"), "layers", "full", {}),)),
        "block-moe[ep2], two micro-batches at a time": (
            "overlaps_expert_communication",
            (Cell("block-moe", False, "ep2"),),
            {},
        ),
        "dense stops": ("trains", ("dense-cut",), {**DENSE, "layout": "tp2-sp", "steps": 2}),
        "latent attention stops": ("trains", ("latent-cut",), {**LATENT, "layout": "tp2-sp", "steps": 2}),
        "latent attention, tp2-sp then pp2": (resumed, ("latent-cut", "latent"), {**LATENT, "layout": "pp2"}),
        "sinks stop": ("trains", ("sinks-cut",), {**SINKS, "layout": "tp2-sp", "steps": 2}),
        "sinks, tp2-sp then ep2": (resumed, ("sinks-cut", "sinks"), {**SINKS, "layout": "ep2"}),
        "experts stop, unsharded": (
            "trains",
            ("experts-plain-cut",),
            {**plain, "layout": "ep2", "steps": 3},
        ),
        "experts stop": ("trains", ("experts-cut",), {**EXPERTS, "layout": "ep2", "steps": 3}),
        "two micro-batches at a time, in bf16": (
            "trains_as_without",
            ("overlapped", {"ep_overlap": True}),
            {**EXPERTS, "layout": "ep2", "steps": 3, "eval_interval": 2, "precision": "bf16"},
        ),
        **{
            f"experts, {of} then {name}": (
                "resumes_a_copy",
                (name, f"experts-{of}", "experts"),
                {**options, "layout": to},
            )
            for of, name, to, options in (
                ("cut", "joined", "pp2", EXPERTS),
                ("alone", "apart", "ep2", EXPERTS),
                ("alone", "whole-each", "tp2-etp1-sp", EXPERTS),
                ("plain", "plain-apart", "ep2", plain),
                ("plain-cut", "plain-joined", "dp2", plain),
            )
        },
    }


def bad_input(files: Files, processes: int) -> Plan:
    """Options of runs that the command line refuses, and the name that the message contains."""
    tiny, damaged = str(files.tiny), str(files.damaged)
    alone: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
        "world-size": ("layout: ", {"tp": 2}, ()),
        "fsdp-pp": ("--pp 2", {"fsdp": "optim", "pp": 2}, ()),
        "fsdp-cpu": ("--fsdp: ", {"fsdp": "optim_grads_params", "norm_interval": 0}, ()),
        "fsdp-sgd": ("--optimizer sgd", {"fsdp": "optim", "optimizer": "sgd"}, ()),
        "fp8": ("--precision: ", {"precision": "fp8"}, ()),
        "a2a": ("--cp-comm-type: ", {"cp_comm_type": "a2a"}, ()),
        "unknown-field": ("transformer.nonsense", {"megatron": ["transformer.nonsense=1"]}, ()),
        "unknown-group": ("--megatron: ", {"megatron": ["nonsense=1"]}, ()),
        "engine": ("--tp", {"engine": "accelerate", "tp": 2}, ()),
        "batches": ("--micro-batch-size 3", {"micro_batch_size": 3}, ()),
        "short": ("--seq-length", {"data": [tiny]}, ()),
        "damaged": ("damaged.idx", {"data": [damaged]}, ()),
        "vocabulary": ("token", {"data": [str(files.foreign)]}, ()),
        "objective": ("--objective", {"objective": "causal"}, ()),
        "held": ("--output: ", {"output": str(files.run("whole"))}, ()),
        "other-data": (
            "--data: ",
            {"output": str(files.run("whole")), "steps": STEPS + 1, "data": [str(files.more)]},
            ("--resume",),
        ),
        "other-seed": ("--seed", {"output": str(files.run("whole")), "seed": 5}, ("--resume",)),
        "no-weights": (str(files.bare), {"from_scratch": False, "model": str(files.bare)}, ()),
    }
    two: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
        "heads": ("--tp", {"tp": 2, "model": str(files.one_head)}, ()),
        "stages": ("--pp", {"pp": 2, "model": str(files.three_layers)}, ()),
        "experts": ("--ep", {"ep": 2}, ()),
        "context": ("--seq-length: ", {"cp": 2, "seq_length": 18}, ()),
        "sequence": ("--seq-length: ", {"tp": 2, "seq_length": 15}, ()),
        "interleaved": ("--vp: ", {"pp": 2, "vp": 2, "global_batch_size": 3}, ()),
        "held-by-main": ("--output: ", {"output": str(files.run("whole"))}, ()),
    }
    chosen = alone if processes == 1 else two
    return {
        f"refuses {name}": ("refuses", (name, said, options, *flags), {})
        for name, (said, options, flags) in chosen.items()
    }


def kill_a_run(root: Path) -> None:
    """Every process of a run, while it trains: `_two` resumes it."""
    from tests.parallel import megatron_checks as checks

    os.environ["DLM_BRIDGE_PLATFORM"] = "cpu"
    options = {"layout": "tp2-sp", "async_save": True}
    fork(root / "killed", 2, lambda: [("killed", partial(checks.is_killed, Files(root), "killed", 7, **options))])


@dataclass(frozen=True)
class LayoutChanges:
    """Runs that stop in one layout and go on in another: their losses and gradient norms are those of one process."""

    name: str  # which the runs' names begin with
    stopped: dict[int, list[tuple[str, str, str]]]  # by the number of processes: subject, layout before, layout after
    options: Callable[[Path, str], dict[str, Any]]  # of the runs in a folder, of a subject
    more: Mapping[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # options by subject, layout before
    resumed: Mapping[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # options that the resume changes

    @property
    def subjects(self) -> list[str]:
        return sorted({subject for runs in self.stopped.values() for subject, *_ in runs})

    @property
    def runs(self) -> list[tuple[str, str]]:
        """Subject and name of each run in two layouts; `whole` names the one that it is compared with."""
        return [(run[0], f"{self.name}-{run[0]}-{run[1]}") for runs in self.stopped.values() for run in runs]

    def whole(self, subject: str) -> str:
        return f"{self.name}-{subject}"

    @property
    def checks(self) -> list[tuple[int, str]]:
        """Each number of processes, with the name of each of its checks."""
        return [(processes, name) for processes in (1, *self.stopped) for name in self.plan(processes)]

    def plan(self, processes: int, root: Path = Path()) -> Plan:
        if processes == 1:
            return {
                f"{subject}, whole": ("trains", (self.whole(subject),), self._options(root, subject))
                for subject in self.subjects
            }
        found: Plan = {}
        for subject, before, after in self.stopped.get(processes, ()):
            name = f"{self.name}-{subject}-{before}"
            run = self._options(root, subject) | self.more.get((subject, before), {})
            found[f"{subject}, {before}"] = ("trains", (name,), {**run, "layout": before, "steps": 2})
            run |= self.resumed.get((subject, before), {})
            resumed = ("resumes_as_if_nothing_had_been", (name, self.whole(subject)), {**run, "layout": after})
            found[f"{subject}, {before} then {after}"] = resumed
        return found

    def _options(self, root: Path, subject: str) -> dict[str, Any]:
        # Adam's steps of gradients next to nothing are noise, but for an epsilon that is larger than they are.
        small = {"steps": 4, "save_interval": 2, "eval_interval": 2, "adam_eps": 1.0, "warmup_steps": 0}
        return {"subject": subject, "from_scratch": False, **small, **self.options(root, subject)}

    def launch(self, worker: str, root: Path, *arguments: str) -> Results:
        """Run the module whose main program, given the folder and the `arguments`, is
        `main(root, self.plan, self.name)`."""
        launch(worker, root, processes=1, timeout_s=1100, arguments=arguments)
        return self.results(root)

    def results(self, root: Path) -> Results:
        """What such a module has reported."""
        return {processes: forked(root / f"{self.name}{processes}", processes) for processes in (1, *self.stopped)}


def main(root: Path, make_plan: Callable[[int, Path], Plan] = plan, name: str = "world") -> None:
    """Each number of processes goes through its plan, and reports to ROOT/NAME and the number."""
    from tests.parallel import megatron_checks as checks  # imports megatron-core
    from tests.train.conftest import undrawn

    torch.set_num_threads(1)
    undrawn(pytest.MonkeyPatch())
    os.environ["DLM_BRIDGE_PLATFORM"] = "cpu"
    files = Files(root)

    def of(processes: int) -> Iterator[tuple[str, Callable[[], None]]]:
        for check_name, (check, arguments, options) in make_plan(processes, root).items():
            yield check_name, partial(getattr(checks, check), files, *arguments, **options)

    for processes in WORLDS:
        fork(root / f"{name}{processes}", processes, partial(of, processes))


if __name__ == "__main__":
    kill_a_run(Path(sys.argv[1]))
    main(Path(sys.argv[1]))
