"""Checkpoints of a run, for both engines: atomic writes, digests of every file, checks before a resume.

In the Hub layout a checkpoint is a folder checkpoints/step-NNNNNNN of the output folder. An engine defines its weights
and optimizer state (`train.accelerate.checkpoints`); trainer state and tokenizer files are the same for both. A resume
starts from the newest complete checkpoint. Later ones, damaged or incomplete, are renamed and kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from dlm_bridge.convert.card import write_run_card
from dlm_bridge.convert.formats.hub_weights import FP8, SAFETENSORS_INDEX, read_header
from dlm_bridge.convert.manifest import (
    FILE_DIGESTS,
    check_files,
    check_stored,
    digests_of,
    file_names,
    write_digests,
)
from dlm_bridge.distributed import from_all
from dlm_bridge.errors import CheckpointError, DlmBridgeError, NonFiniteError, first_of
from dlm_bridge.files.atomic import atomic_folder, disk_errors
from dlm_bridge.files.pickles import load_torch_file
from dlm_bridge.files.reading import library_cause, read_json
from dlm_bridge.hub import STEP_NAME
from dlm_bridge.job import named_rank
from dlm_bridge.train.early_stopping import KeptCheckpoints

STATE = "trainer_state.pt"
RANK_DIGESTS = ".digests_{rank}"  # file with the `RankFiles` of one rank, during a save in the background
RANK_FILES = "__{rank}_*.distcp"  # files that a rank writes of a distributed checkpoint
DAMAGED = ".damaged"
LOOK_AGAIN_S = 60.0  # a network file system may show the changes of another host this much later (NFS: acdirmax)
SHARED = "`output` must be one folder that all hosts share and see alike"

T = TypeVar("T")
RankFiles = dict[str, tuple[int, str]]  # size and digest of each file that a rank wrote of a distributed checkpoint


def step_folder(output: Path, step: int) -> Path:
    """Folder of the checkpoint of `step`, such as checkpoints/step-0000010."""
    return output / "checkpoints" / f"step-{step:07d}"


def named_checkpoints(root: Path, name: re.Pattern[str] = STEP_NAME) -> list[tuple[int, Path]]:
    """(step, folder) of all folders in `root` with the name of a checkpoint, complete or not, oldest first."""
    named = [(name.fullmatch(folder.name), folder) for folder in root.iterdir()] if root.is_dir() else []
    return sorted((int(match[1]), folder) for match, folder in named if match)


def run_checkpoints(output: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint in the Hub layout with a trainer state, oldest first."""
    found = named_checkpoints(output / "checkpoints")
    return [each for each in found if (each[1] / STATE).is_file()]


def temporary_folder(output: Path, step: int) -> Path:
    """Folder of the checkpoint of `step` until it is complete."""
    folder = step_folder(output, step)
    return folder.with_name(f".{folder.name}.tmp")


# -- writing


def atomic_checkpoint(output: Path, step: int) -> AbstractContextManager[Path]:
    """Context manager with an empty `temporary_folder`, which is renamed to the checkpoint of `step` if the block ends
    without an exception. A killed process leaves a complete checkpoint or none. Raises ResourceError if the disk is
    full."""
    return atomic_folder(step_folder(output, step), temporary_folder(output, step), _remedy(output))


def checkpoint_errors(output: Path, step: int) -> AbstractContextManager[None]:
    """Context manager that raises disk errors while the checkpoint of `step` is written as ResourceError."""
    return disk_errors(step_folder(output, step), _remedy(output))


def _remedy(output: Path) -> str:
    found = run_checkpoints(output)
    return how_to_go_on(found[-1][1] if found else None)


def how_to_go_on(newest: Path | None, killed: bool = False) -> str:
    """Remedy after a checkpoint could not be written.

    Args:
        newest: newest complete checkpoint.
        killed: True if a process that writes it was killed, False if the disk is full.
    """
    if killed:
        kept = "no checkpoint was written yet" if newest is None else f"{newest.name} stays the newest checkpoint"
        return f"{kept}: if the system killed it for lack of memory (see dmesg), give the job more, then `resume`"
    if newest is None:
        return "no checkpoint was written yet: make room there, or use another `output`"
    size = sum((newest / name).stat().st_size for name in file_names(newest))
    return (
        f"{newest.name} stays the newest checkpoint: free at least its size, {size / 1e6:,.1f} MB, there (a smaller "
        "`keep_last` keeps fewer), then `resume`"
    )


def write_state(
    folder: Path, step: int, tokenizer: Any, state: dict[str, Any], written: Sequence[RankFiles] = ()
) -> None:
    """Write the other files of a checkpoint: tokenizer, model card, `state` (which `load_state` returns) and, last,
    digests. `written` as in `gather_digests`."""
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    write_run_card(folder, step)
    with (folder / STATE).open("wb") as stream:  # torch's own file object hides the cause of a failed write
        torch.save({"step": step, **state}, stream)
    gather_digests(folder, written)


def rank_files(folder: Path, rank: int) -> RankFiles:
    """Size and digest of the files that a rank wrote, from `write_rank_digests` or computed. Called by that rank."""
    with contextlib.suppress(OSError, ValueError):  # none, or not written on a full disk
        found = json.loads((folder / RANK_DIGESTS.format(rank=rank)).read_text())
        return {name: (size, digest) for name, (size, digest) in found.items()}
    own = [file.relative_to(folder).as_posix() for file in folder.rglob(RANK_FILES.format(rank=rank))]
    return {name: ((folder / name).stat().st_size, digest) for name, digest in digests_of(folder, own).items()}


def write_rank_digests(folder: Path, rank: int) -> None:
    """Write `rank_files` to a file, in the process that writes this rank's part in the background."""
    (folder / RANK_DIGESTS.format(rank=rank)).write_text(json.dumps(rank_files(folder, rank)))


def gather_digests(folder: Path, written: Sequence[RankFiles]) -> None:
    """Write digests of all files of a checkpoint that is complete; called by one process.

    Args:
        written: `rank_files` of every rank of a distributed checkpoint, by rank.

    Raises CheckpointError if a rank's file is not visible to this process with its size within `LOOK_AGAIN_S`.
    """
    deadline = time.monotonic() + LOOK_AGAIN_S
    for rank, files in enumerate(written):
        for name, (size, _) in files.items():
            while (found := file_size(folder / name)) != size:
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        folder / name,
                        f"{named_rank(rank)} wrote {size} bytes, {named_rank(0)} sees {_seen(found)}: {SHARED}; the "
                        "checkpoint was not written",
                    )
                time.sleep(1)
        (folder / RANK_DIGESTS.format(rank=rank)).unlink(missing_ok=True)
    digests = {name: digest for files in written for name, (_, digest) in files.items()}
    others = [name for name in file_names(folder) if name not in digests]
    write_digests(folder, digests | digests_of(folder, others))


def file_size(file: Path) -> int | None:
    """Size of a file in bytes, None if this process does not see it."""
    try:
        return file.stat().st_size
    except OSError:
        return None


def _seen(value: object) -> str:
    return "nothing" if value is None else str(value)


def load_state(folder: Path) -> dict[str, Any]:
    """Load the trainer state, with tensors on the CPU. Raises CheckpointError if the file is damaged."""
    with damaged_state(folder / STATE, folder):
        state = load_torch_file(folder / STATE)
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}")
        return state


@contextlib.contextmanager
def damaged_state(file: Path, folder: Path) -> Iterator[None]:
    """Context manager that raises errors of loading `file` of the checkpoint `folder` as CheckpointError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            file, f"is damaged ({load_failure(error)}): remove {folder} to resume from an earlier checkpoint"
        ) from error


def load_failure(error: BaseException) -> str:
    """One-line message of an error; of errors that torch gathered from all ranks, the first."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return textwrap.shorten(library_cause(error), 400, placeholder=" ...")


def remove_old_checkpoints(output: Path, kept: KeptCheckpoints | None = None) -> None:
    """Remove incomplete checkpoints of killed processes, and those that are not `kept` (None: keep all)."""
    root = output / "checkpoints"
    if root.is_dir():
        for leftover in root.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    if kept is not None:
        for folder in kept.removed(run_checkpoints(output)):
            remove_checkpoint(folder)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a killed process leaves nothing that looks like one."""
    hidden = folder.with_name(f".{folder.name}.old")
    with disk_errors(folder, "an old checkpoint that `keep_last` would remove"):
        shutil.rmtree(hidden, ignore_errors=True)
        os.replace(folder, hidden)
        shutil.rmtree(hidden)


# -- selection of the checkpoint to resume from


@dataclass(frozen=True)
class ResumePoint:
    """Newest complete checkpoint of a run, and later ones that are damaged or incomplete."""

    step: int = 0
    folder: Path | None = None  # None: the run has no checkpoint yet
    damaged: tuple[tuple[Path, str], ...] = ()  # (folder, problem), newest first

    @property
    def notes(self) -> list[str]:
        """Warnings, one line each, about damaged checkpoints and about one that cannot be checked."""
        lines = [
            f"warning: {folder}: {problem}: renamed to {_aside(folder).name}, the run resumes from step {self.step}"
            for folder, problem in self.damaged
        ]
        if self.folder is not None and not (self.folder / FILE_DIGESTS).is_file():
            lines.append(
                f"warning: {self.folder} has no {FILE_DIGESTS}, like those of early versions: it cannot be "
                "checked for damage"
            )
        return lines

    def set_aside(self) -> None:
        """Rename the damaged checkpoints, so that the run can save at their steps. Called by one process."""
        for folder, _ in self.damaged:
            with disk_errors(folder):
                os.rename(folder, _aside(folder))


def find_resume_point(found: Sequence[tuple[int, Path]], required: str, last: int | None = None) -> ResumePoint:
    """Find the newest complete checkpoint. Collective: each process reads a part of the files.

    A checkpoint is damaged only if that is not a matter of one host: all ranks see the same files, and a second rank
    finds the problem too.

    Args:
        found: (step, folder) of the checkpoints, oldest first.
        required: name of a file that each must have.
        last: step of the last one to consider, if there is a checkpoint of that step.

    Raises:
        CheckpointError: there are checkpoints, and none is complete, or ranks do not agree about one.
    """
    found = sorted({each for rank in from_all(list(found)) for each in rank})
    if found:
        agreed(found[0][1].parent, [folder.name for _, folder in found], _kind)
    if last in [step for step, _ in found]:
        found = [each for each in found if each[0] <= last]
    damaged: list[tuple[Path, str]] = []
    for step, folder in reversed(found):
        problem = _agreed_problem(folder, required)
        if problem is None:
            return ResumePoint(step, folder, tuple(damaged))
        damaged.append((folder, problem))
    if damaged:
        each = "; ".join(f"{folder.name} {problem}" for folder, problem in damaged)
        raise CheckpointError(
            damaged[0][0].parent,
            f"no complete checkpoint to resume from: {each}: restore one of them, or start again in another `output`",
        )
    return ResumePoint()


def agreed(folder: Path, names: Iterable[str], look: Callable[[Path], T]) -> dict[str, T]:
    """What `look` returns for each path in `folder` of which a rank gives the name, once it is the same on all ranks.
    Collective.

    A network file system may show another host's changes late. Raises CheckpointError after `LOOK_AGAIN_S`, which
    names the ranks that see something else than the first one.
    """
    every = sorted({name for listed in from_all(list(names)) for name in listed})
    deadline = time.monotonic() + LOOK_AGAIN_S
    while True:
        views = from_all({name: look(folder / name) for name in every})
        differing = next((name for name in every if any(view[name] != views[0][name] for view in views)), None)
        if differing is None:
            return views[0]
        if from_all(time.monotonic() >= deadline)[0]:
            break
        time.sleep(1)
    first, *others = [view[differing] for view in views]
    ranks = [rank for rank, seen in enumerate(others, 1) if seen != first]
    more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    raise CheckpointError(
        folder / differing,
        f"{named_rank(ranks[0])}{more} sees {_seen(views[ranks[0]][differing])}, {named_rank(0)} sees {_seen(first)}: "
        f"{SHARED}; nothing was renamed",
    )


def _kind(path: Path) -> str | None:
    return None if file_size(path) is None else "a checkpoint"


def _bytes(file: Path) -> str | None:
    size = file_size(file)
    return None if size is None else f"{size} bytes"


def _agreed_problem(folder: Path, required: str) -> str | None:
    """Problem of a checkpoint, or None. Collective. Raises CheckpointError if ranks do not agree."""
    names = [FILE_DIGESTS]
    with contextlib.suppress(OSError):
        names += file_names(folder)
    agreed(folder, names, _bytes)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    problems = from_all(_problem(folder, required, rank, ranks))
    finder = next((rank for rank, problem in enumerate(problems) if problem is not None), None)
    if finder is None:
        return None
    others = {0, ranks - 1} - {finder}  # two hosts, if there are several
    again = from_all(_problem(folder, required, finder, ranks) if rank in others else None)
    for other in others:
        if again[other] is None:
            raise CheckpointError(
                folder,
                f"{problems[finder]}, as {named_rank(finder)} reads it, but not as {named_rank(other)} does: check "
                "memory and mounts of both hosts; nothing was renamed",
            )
    return problems[finder]


def _problem(folder: Path, required: str, part: int, parts: int) -> str | None:
    """Problem in one of `parts` parts of a checkpoint, or None."""
    try:
        if not (folder / required).is_file():
            return f"is incomplete: it has no {required}"
        if not (folder / FILE_DIGESTS).is_file():
            return _incomplete(folder)
        changed = [each for each in check_files(folder, rank=part, ranks=parts) if not each.is_new]
    except (DlmBridgeError, OSError) as error:
        return f"is damaged: {error}"
    if not changed:
        return None
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return f"is damaged: {changed[0].file} {changed[0].detail}{more}"


def _incomplete(folder: Path) -> str | None:
    """Problem that the headers of a checkpoint without digests show, or None. Raises CheckpointError if a file is
    truncated."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.distcp")]
    if not weights:
        return "is incomplete: it has no weights"
    for file in weights:
        if file.suffix == ".safetensors":
            read_header(file, (FP8,))
    if (folder / SAFETENSORS_INDEX).is_file():
        named = {str(name) for name in dict(read_json(folder / SAFETENSORS_INDEX).get("weight_map", {})).values()}
        if missing := [name for name in named if not (folder / name).is_file()]:
            return f"is incomplete: it has no {first_of(missing)}"
    if absent := check_stored(folder):
        return f"is incomplete: {absent[0]}"
    torn = [file.name for file in (*folder.glob("*.pt"), *folder.glob("*.pth")) if not zipfile.is_zipfile(file)]
    return f"is damaged: {first_of(torn)} is truncated" if torn else None


def _aside(folder: Path) -> Path:
    """New name of a damaged checkpoint: step-0000020.damaged, or .damaged-2 and so on."""
    aside, number = folder.with_name(folder.name + DAMAGED), 2
    while os.path.lexists(aside):
        aside, number = folder.with_name(f"{folder.name}{DAMAGED}-{number}"), number + 1
    return aside


# -- tokenizers

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer. The files of an unchanged one are copied byte for byte, with the code files that they name,
    because transformers 5 saves class names that older versions do not know."""
    sources = _tokenizer_sources(tokenizer.name_or_path)
    if "tokenizer_config.json" in sources and _is_unchanged(tokenizer):
        for name, path in sources.items():
            shutil.copyfile(path, folder / name)
    else:
        tokenizer.save_pretrained(folder)


def _tokenizer_sources(place: str) -> dict[str, str]:
    """Files of the tokenizer in a folder or in the Hub's cache, by name."""
    if not place:
        return {}
    found = {name: _find_cached(place, name) for name in TOKENIZER_FILES}
    if (config := found["tokenizer_config.json"]) is not None:
        auto_map = json.loads(Path(config).read_text("utf-8")).get("auto_map") or {}
        references = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
        for reference in references if isinstance(references, list) else [references]:
            if isinstance(reference, str):
                name = reference.split("--")[-1].split(".")[0] + ".py"
                found[name] = _find_cached(place, name)
    return {name: path for name, path in found.items() if path is not None}


def _find_cached(place: str, name: str) -> str | None:
    from transformers.utils.hub import cached_file

    try:
        return cached_file(place, name, local_files_only=True)
    except OSError:
        return None


def _is_unchanged(tokenizer: Any) -> bool:
    """True if a tokenizer has the vocabulary, special tokens and template of its files."""
    from transformers import AutoTokenizer

    try:
        original: Any = AutoTokenizer.from_pretrained(
            tokenizer.name_or_path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError):
        return False
    facts = [(each.get_vocab(), each.special_tokens_map, each.chat_template) for each in (tokenizer, original)]
    return type(tokenizer) is type(original) and facts[0] == facts[1]


def check_finite(step: int, parameters: Iterable[torch.Tensor]) -> None:
    """Raise NonFiniteError if a weight is not finite after `step`, before a checkpoint is saved. Finite gradients can
    also lead to non-finite weights, for example with an epsilon of zero."""
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not bool(local.detach().isfinite().all()):
            raise NonFiniteError(
                "weights are NaN or infinite, no checkpoint is written: resume from an earlier checkpoint with "
                "another `lr` or `adam_eps`",
                [f"step {step}"],
            )
