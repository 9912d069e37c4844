"""The folders of Megatron's legacy format, one `model_optim_rng.pt` for each tensor, pipeline and expert rank.

They are mp_rank_TT, with _PPP where the pipeline has several stages and _EEE where there is expert parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlm_bridge.convert.formats.torch_file import FileTensor, Inert, read_torch_file, tensors_in
from dlm_bridge.errors import DlmBridgeError

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODEL = re.compile(r"model(\d*)")


@dataclass(frozen=True)
class Rank:
    """One folder's content. `chunks` are the virtual pipeline's, each by the rank's own parameter names."""

    name: str
    tp: int
    pp: int
    ep: int
    chunks: tuple[dict[str, FileTensor], ...]
    rest: dict[str, Any]
    histories: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}/{FILE}"


@dataclass(frozen=True)
class LegacyFiles:
    """Every rank of an iteration, and the sizes that the folders and the saved arguments show."""

    folder: Path
    ranks: dict[tuple[int, int, int], Rank]  # by (tp, pp, ep)
    tp: int
    pp: int
    ep: int
    vp: int

    @property
    def first(self) -> Rank:
        return self.ranks[min(self.ranks)]

    @property
    def common(self) -> dict[str, Any]:
        """What is not the model's in the first rank's file; `args` is the Namespace's dict."""
        rest = dict(self.first.rest)
        if isinstance(rest.get("args"), Inert):
            rest["args"] = rest["args"].fields
        return rest

    def training_state(self) -> list[str]:
        """What the first rank's folder holds of the run's state, the optimizer's under "optimizer."."""
        rank = self.first
        found = [f"optimizer.{key}" for key in ("optimizer", "opt_param_scheduler") if rank.rest.get(key)]
        found += [f"optimizer.{path.name}" for path in (self.folder / rank.name).glob("distrib_optim*.pt")]
        return [*found, *(["rng_state"] if rank.rest.get("rng_state") else [])]

    def histories(self) -> list[str]:
        """The modules of the first rank whose extra state (an FP8 scaling history) is not empty."""
        return list(self.first.histories)

    def tensors(self) -> Iterable[tuple[str, FileTensor]]:
        """(folder and name, tensor) of every parameter of every rank."""
        for rank in self.ranks.values():
            for number, chunk in enumerate(rank.chunks):
                part = f"model{number}." if len(rank.chunks) > 1 else ""
                yield from ((f"{rank.name}/{part}{name}", tensor) for name, tensor in chunk.items())


def is_legacy(folder: Path) -> bool:
    """Whether a folder is an iteration of the legacy format."""
    return any(_RANK.fullmatch(path.name) and path.is_dir() for path in folder.iterdir())


def open_legacy(folder: Path) -> LegacyFiles:
    """Read every rank's pickle, no tensor. Raises DlmBridgeError naming the folder or file that is missing, hostile or
    not of the same run as the others."""
    found = []
    for path in sorted(folder.iterdir()):
        if match := _RANK.fullmatch(path.name):
            found.append((path.name, [int(number) for number in match.groups() if number is not None]))
    ranks = [_read_rank(folder, name, numbers) for name, numbers in found]
    if len({len(numbers) for _, numbers in found}) > 1:
        raise DlmBridgeError(f"{folder}: folders of two layouts lie side by side, {found[0][0]} and {found[-1][0]}")
    numbered = [rank for rank, _ in ranks]
    if len(found[0][1]) == 2 and _is_whole_stage(numbered):  # the second number counts experts, not stages
        numbered = [replace(r, pp=0, ep=r.pp) for r in numbered]
    by_place = {(rank.tp, rank.pp, rank.ep): rank for rank in numbered}
    first = by_place[min(by_place)]
    for rank in numbered:
        for what, a, b in (
            ("iteration", first.rest.get("iteration"), rank.rest.get("iteration")),
            ("number of virtual pipeline chunks", len(first.chunks), len(rank.chunks)),
        ):
            if a != b:
                raise DlmBridgeError(f"{folder / rank.file}: its {what} is {b}, that of {first.name} is {a}")
    args = first.rest.get("args")
    said = args.fields if isinstance(args, Inert) else {}
    tp, pp, ep = (
        max(_size(said.get(name)), 1 + max(key[axis] for key in by_place))
        for axis, name in enumerate(
            ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
        )
    )
    files = LegacyFiles(folder, by_place, tp, pp, ep, len(first.chunks))
    _check_whole(files, suffixes=len(found[0][1]) - 1)
    return files


def _read_rank(folder: Path, name: str, numbers: list[int]) -> tuple[Rank, int]:
    path = folder / name / FILE
    if not path.is_file() or path.is_symlink() or (folder / name).is_symlink():
        raise DlmBridgeError(f"{path} does not exist or is a link: every rank folder has one")
    content = read_torch_file(path)
    if not isinstance(content, dict):
        raise DlmBridgeError(f"{path}: is not a dict")
    version = content.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 3:
        raise DlmBridgeError(
            f"{path}: checkpoint version {version!r}: its query, key and value rows are in an old order; load and "
            "save it once with Megatron-LM"
        )
    models = sorted(
        (int(match[1] or 0), key) for key in content if isinstance(key, str) and (match := _MODEL.fullmatch(key))
    )
    if not models or [number for number, _ in models] != list(range(len(models))):
        raise DlmBridgeError(f"{path}: has no model (or not every one of model0, model1, ...)")
    chunks = tuple(_parameters(path, content[key]) for _, key in models)
    rest = {key: value for key, value in content.items() if not _MODEL.fullmatch(str(key))}
    tp, pp, ep = (*numbers, 0, 0)[:3]
    histories = tuple(
        part
        for _, key in models
        if isinstance(content[key], dict)
        for part, state in content[key].items()
        if str(part).endswith("_extra_state") and (isinstance(state, Inert) or getattr(state, "nbytes", 0) > 0)
    )
    return Rank(name, tp, pp, ep, chunks, rest, histories), len(numbers)


def _parameters(path: Path, model: Any) -> dict[str, FileTensor]:
    found = {}
    for name, tensor in tensors_in(model):
        while name.startswith("module."):
            name = name.removeprefix("module.")
        if name.startswith("language_model."):
            raise DlmBridgeError(
                f"{path}: {name}: a model of Megatron-LM before megatron-core, which is not supported"
            )
        if re.search(r"mlp\.experts\.weight[12]$", name):
            raise DlmBridgeError(f"{path}: {name}: experts of the removed grouped-GEMM layer are not supported")
        if not name.endswith("_extra_state"):
            found[name] = tensor
    return found


def _is_whole_stage(ranks: list[Rank]) -> bool:
    """Whether every rank has both ends of the model, so that the second number of its folder is no stage."""
    return all(
        any("embedding.word_embeddings.weight" in chunk for chunk in rank.chunks)
        and any("decoder.final_layernorm.weight" in chunk for chunk in rank.chunks)
        for rank in ranks
    )


def _check_whole(files: LegacyFiles, suffixes: int) -> None:
    """Every tensor parallel rank of every stage is there, and every expert parallel one."""
    for pp in range(files.pp):
        present = [(tp, ep) for tp, p, ep in files.ranks if p == pp]
        for axis, size in ((0, files.tp), (1, files.ep)):
            for number in range(size):
                if number not in {place[axis] for place in present}:
                    tp, ep = (number, 0) if axis == 0 else (0, number)
                    parts = [f"{pp:03d}"] if suffixes == 2 or (suffixes == 1 and files.ep == 1) else []
                    parts += [f"{ep:03d}"] if suffixes == 2 or (suffixes == 1 and files.ep > 1) else []
                    name = "_".join([f"mp_rank_{tp:02d}", *parts])
                    raise DlmBridgeError(
                        f"{files.folder / name} is missing: the checkpoint has tensor parallel size {files.tp}, "
                        f"pipeline size {files.pp}, expert parallel size {files.ep}"
                    )


def _size(value: Any) -> int:
    return value if type(value) is int and 0 < value < 1 << 20 else 1
