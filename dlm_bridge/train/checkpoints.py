"""Checkpoints of a run, of both engines: written atomically with a digest of every file, checked before a resume.

In the Hub's layout each is a folder DIR/checkpoints/step-NNNNNNN with trainer state and tokenizer files: its contents
are an engine's (`train.accelerate.checkpoints`). What is shared is the choice of the one that a resume goes on from:
the newest that is whole. Those after it, damaged or incomplete, are renamed and kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import textwrap
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from dlm_bridge.convert.formats.hub_weights import FP8, SAFETENSORS_INDEX, read_header
from dlm_bridge.convert.manifest import FILE_DIGESTS, check_files, digests_of, file_names, write_digests
from dlm_bridge.distributed import from_all
from dlm_bridge.errors import DlmBridgeError, first_of
from dlm_bridge.files.atomic import atomic_folder, disk_errors
from dlm_bridge.files.pickles import load_torch_file
from dlm_bridge.files.reading import library_cause, read_json
from dlm_bridge.hub import STEP_NAME

STATE = "trainer_state.pt"
RANK_DIGESTS = ".digests_"  # of one rank, while a save is under way
RANK_FILES = "__{rank}_*.distcp"  # what a rank writes of a distributed checkpoint
DAMAGED = ".damaged"

T = TypeVar("T")


def step_folder(output: Path, step: int) -> Path:
    """DIR/checkpoints/step-0000010."""
    return output / "checkpoints" / f"step-{step:07d}"


def named_checkpoints(root: Path, name: re.Pattern[str] = STEP_NAME) -> list[tuple[int, Path]]:
    """(step, folder) of all folders in `root` with the name of a checkpoint, whole or not, oldest first."""
    named = [(name.fullmatch(folder.name), folder) for folder in root.iterdir()] if root.is_dir() else []
    return sorted((int(match[1]), folder) for match, folder in named if match)


def run_checkpoints(output: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint in the Hub's layout with its trainer's state, oldest first."""
    found = named_checkpoints(output / "checkpoints")
    return [each for each in found if (each[1] / STATE).is_file()]


def temporary_folder(output: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written, until it is complete."""
    folder = step_folder(output, step)
    return folder.with_name(f".{folder.name}.tmp")


# -- writing


def atomic_checkpoint(output: Path, step: int) -> AbstractContextManager[Path]:
    """The empty `temporary_folder`, which becomes the checkpoint of `step` when the block ends without an exception.
    A kill leaves no folder of this name or a complete one. Raises DlmBridgeError where the disk refuses."""
    return atomic_folder(step_folder(output, step), temporary_folder(output, step), _remedy(output))


def checkpoint_errors(output: Path, step: int) -> AbstractContextManager[None]:
    """Turn what the disk refuses while the checkpoint of `step` is written into a DlmBridgeError."""
    return disk_errors(step_folder(output, step), _remedy(output))


def _remedy(output: Path) -> str:
    found = run_checkpoints(output)
    return how_to_go_on(found[-1][1] if found else None)


def how_to_go_on(newest: Path | None, killed: bool = False) -> str:
    """What to do after a checkpoint could not be written, where `newest` is the last one that could; `killed`: because
    a process that writes it was, else because the disk refused."""
    if killed:
        kept = "no checkpoint was written yet" if newest is None else f"{newest.name} stays the newest checkpoint"
        return f"{kept}: where the system killed it for want of memory (see dmesg), give the job more, then --resume"
    if newest is None:
        return "no checkpoint was written yet: make room there, or choose another --output"
    size = sum((newest / name).stat().st_size for name in file_names(newest))
    return (
        f"{newest.name} stays the newest checkpoint: free at least {size / 1e6:,.1f} MB there, which is what that one "
        "takes (--keep-last N keeps fewer), then --resume"
    )


def write_state(folder: Path, step: int, tokenizer: Any, state: dict[str, Any]) -> None:
    """Write what a checkpoint has beside the weights, the digests last; `state` is what `load_state` returns."""
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    with (folder / STATE).open("wb") as stream:  # torch's own files do not say why they could not be written
        torch.save({"step": step, **state}, stream)
    gather_digests(folder)


def write_rank_digests(folder: Path, rank: int) -> None:
    """Write the digests of this rank's files of a distributed checkpoint, for `gather_digests` on the first rank."""
    own = [file.relative_to(folder).as_posix() for file in folder.rglob(RANK_FILES.format(rank=rank))]
    (folder / f"{RANK_DIGESTS}{rank}").write_text(json.dumps(digests_of(folder, own)))


def gather_digests(folder: Path) -> None:
    """Write all ranks' digests in one file, with those of the files that no rank has digested."""
    digests: dict[str, str] = {}
    for notes in folder.glob(f"{RANK_DIGESTS}*"):
        digests |= json.loads(notes.read_text())
        notes.unlink()
    write_digests(folder, digests | digests_of(folder, [name for name in file_names(folder) if name not in digests]))


def load_state(folder: Path) -> dict[str, Any]:
    """The trainer's state, with tensors on the CPU. Raises DlmBridgeError where the file is damaged."""
    with damaged_state(folder / STATE, folder):
        state = load_torch_file(folder / STATE)
        if not isinstance(state, dict):
            raise TypeError(f"a {type(state).__name__}")
        return state


@contextlib.contextmanager
def damaged_state(file: Path, folder: Path) -> Iterator[None]:
    """Raise whatever the state in `file`, of the checkpoint `folder`, raises as it is loaded as a DlmBridgeError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (Exception, CheckpointException) as error:
        raise DlmBridgeError(
            f"{file}: damaged ({load_failure(error)}): remove {folder} to resume from before it"
        ) from error


def load_failure(error: BaseException) -> str:
    """The error as one line; of those that torch gathered from all ranks, with their tracebacks, the first."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return textwrap.shorten(library_cause(error), 400, placeholder=" ...")


def remove_old_checkpoints(output: Path, keep_last: int = 0) -> None:
    """Remove what killed writers left, and all but the newest `keep_last` checkpoints (0: keep all)."""
    root = output / "checkpoints"
    if root.is_dir():
        for leftover in root.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    if keep_last:
        for _, folder in run_checkpoints(output)[:-keep_last]:
            remove_checkpoint(folder)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, renamed first, so that a kill in the middle leaves nothing that looks like one."""
    hidden = folder.with_name(f".{folder.name}.old")
    with disk_errors(folder, "an old checkpoint that --keep-last would remove"):
        shutil.rmtree(hidden, ignore_errors=True)
        os.replace(folder, hidden)
        shutil.rmtree(hidden)


# -- choosing the one to resume from


@dataclass(frozen=True)
class ResumePoint:
    """The newest whole checkpoint of a run, and those after it, which are not whole."""

    step: int = 0
    folder: Path | None = None  # None: the run has no checkpoint yet
    damaged: tuple[tuple[Path, str], ...] = ()  # folder and what is wrong with it, newest first

    @property
    def notes(self) -> list[str]:
        """A line on each checkpoint that is not resumed from, and on one that cannot be checked."""
        lines = [
            f"warning: {folder}: {problem}: it is set aside as {_aside(folder).name}, the run goes on from step "
            f"{self.step}"
            for folder, problem in self.damaged
        ]
        if self.folder is not None and not (self.folder / FILE_DIGESTS).is_file():
            lines.append(
                f"warning: {self.folder} has no {FILE_DIGESTS}, as one of an early version: whether it is damaged "
                "cannot be checked"
            )
        return lines

    def set_aside(self) -> None:
        """Rename the checkpoints that are not whole, so that they are kept and the run can save at their steps. One
        process calls it."""
        for folder, _ in self.damaged:
            with disk_errors(folder):
                os.rename(folder, _aside(folder))


def find_resume_point(found: Sequence[tuple[int, Path]], required: str) -> ResumePoint:
    """The newest whole one of (step, folder), oldest first, each with a file `required`. Every process of a run calls
    it, and each reads a part of the files.

    Raises DlmBridgeError where there are checkpoints and none is whole.
    """
    found = from_all(list(found))[0]
    damaged: list[tuple[Path, str]] = []
    for step, folder in reversed(found):
        problems = from_all(_problem(folder, required))
        problem = next((each for each in problems if each is not None), None)
        if problem is None:
            return ResumePoint(step, folder, tuple(damaged))
        damaged.append((folder, problem))
    if damaged:
        each = "; ".join(f"{folder.name} {problem}" for folder, problem in damaged)
        raise DlmBridgeError(
            f"{damaged[0][0].parent}: no whole checkpoint to resume from: {each}: restore one of them, or start anew "
            "in another --output"
        )
    return ResumePoint()


def _problem(folder: Path, required: str) -> str | None:
    """What this process finds wrong with its part of a checkpoint; None where nothing is."""
    try:
        if not (folder / required).is_file():
            return f"is incomplete: it has no {required}"
        if not (folder / FILE_DIGESTS).is_file():
            return _incomplete(folder)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        changed = [each for each in check_files(folder, rank=rank, ranks=ranks) if not each.is_new]
    except (DlmBridgeError, OSError) as error:
        return f"is damaged: {error}"
    if not changed:
        return None
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return f"is damaged: {changed[0].file} {changed[0].detail}{more}"


def _incomplete(folder: Path) -> str | None:
    """What a checkpoint without digests lacks, as far as headers tell. Raises DlmBridgeError for a truncated file."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.distcp")]
    if not weights:
        return "is incomplete: it has no weights"
    for file in weights:
        if file.suffix == ".safetensors":
            read_header(file, FP8)
    if (folder / SAFETENSORS_INDEX).is_file():
        named = {str(name) for name in dict(read_json(folder / SAFETENSORS_INDEX).get("weight_map", {})).values()}
        if missing := [name for name in named if not (folder / name).is_file()]:
            return f"is incomplete: it has no {first_of(missing)}"
    torn = [file.name for file in (*folder.glob("*.pt"), *folder.glob("*.pth")) if not zipfile.is_zipfile(file)]
    return f"is damaged: {first_of(torn)} is truncated" if torn else None


def _aside(folder: Path) -> Path:
    """The name that a damaged checkpoint is kept under: step-0000020.damaged, or .damaged-2 and so on."""
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
    """Write a tokenizer. Unless it was changed, its files are copied byte for byte, with the code files that they
    name: transformers 5 saves class names that older versions do not know."""
    sources = _tokenizer_sources(tokenizer.name_or_path)
    if "tokenizer_config.json" in sources and _is_unchanged(tokenizer):
        for name, path in sources.items():
            shutil.copyfile(path, folder / name)
    else:
        tokenizer.save_pretrained(folder)


def _tokenizer_sources(place: str) -> dict[str, str]:
    """The tokenizer's files in a folder or in the Hub's cache, by name."""
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
    """Whether a tokenizer behaves as the one that its files make."""
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
    """Raise DlmBridgeError if a weight is not finite after `step`, before a checkpoint is saved. Finite gradients can
    also lead to non-finite weights, for example with an epsilon of zero."""
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not bool(local.detach().isfinite().all()):
            raise DlmBridgeError(
                f"step {step}: weights are not finite, no checkpoint is written: resume from an earlier checkpoint "
                "with another --lr or --adam-eps"
            )
