"""Everything in a Hub folder that is not a weight: what is carried over byte for byte, what is left out and named."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dlm_bridge.convert.manifest import FILE_NAME
from dlm_bridge.errors import DlmBridgeError

INDEX = "model.safetensors.index.json"

_LEFT_FOLDERS = {".git", "original"}
_DOWNLOAD_CACHE = (".cache", "huggingface")  # what `hf download --local-dir` notes for itself
_WEIGHT_SUFFIXES = {
    ".safetensors", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".distcp",
    ".nemo", ".npz",
}  # fmt: skip
_WEIGHT_STEMS = ("pytorch_model", "model", "consolidated", "adapter_model", "diffusion_pytorch_model", "weights")
_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04")


@dataclass(frozen=True)
class SideFiles:
    """Paths below the folder, with "/" between the parts."""

    carried: tuple[str, ...]
    left_out: tuple[str, ...]  # a folder ends with "/"


def list_side_files(folder: Path, weights: Collection[str]) -> SideFiles:
    """The side files of a Hub folder whose weights are the files `weights`.

    Raises DlmBridgeError for a link that leads out of the folder and for what is not a plain file.
    """
    carried: list[str] = []
    left_out: list[str] = []
    for directory, subfolders, files in os.walk(folder):
        below = PurePosixPath(Path(directory).relative_to(folder).as_posix())
        for name in sorted(subfolders):
            path = below / name
            if name in _LEFT_FOLDERS or path.parts == _DOWNLOAD_CACHE:
                subfolders.remove(name)
                left_out.append(f"{path}/")
            elif (folder / path).is_symlink():
                raise DlmBridgeError(f"{folder / path}: a link to a folder cannot be carried over: remove it")
        subfolders.sort()
        for name in sorted(files):
            path = below / name
            if str(path) in weights or str(path) == FILE_NAME:
                continue
            if _is_weight_file(folder, path):
                left_out.append(str(path))
            else:
                inside(folder, str(path))
                carried.append(str(path))
    return SideFiles(tuple(carried), tuple(left_out))


def inside(folder: Path, name: str) -> Path:
    """The path of a plain file inside `folder`, links followed.

    The Hub's cache links its snapshots' files to ../../blobs; every other way out is refused. Raises DlmBridgeError.
    """
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name or not relative.parts:
        raise DlmBridgeError(f"{folder}: '{name}' points outside the folder")
    path = folder / relative
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        what = "is a broken link" if path.is_symlink() else "does not exist"
        raise DlmBridgeError(f"{path} {what}") from None
    except (OSError, RuntimeError):
        raise DlmBridgeError(f"{path} is a link that cannot be followed") from None
    allowed = [folder.resolve()]
    home = folder.resolve().parent
    if home.name == "snapshots":
        allowed.append(home.parent / "blobs")
    if not any(root in real.parents for root in allowed):
        raise DlmBridgeError(f"{path} is a link to {real}, outside the folder: copy the file in its place")
    if not stat.S_ISREG(real.stat().st_mode):
        raise DlmBridgeError(f"{path} is not a plain file")
    return path


def copy_files(source: Path, names: Iterable[str], target: Path) -> None:
    """Copy files byte for byte (links become files), with their folders."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _is_weight_file(folder: Path, path: PurePosixPath) -> bool:
    """Weight files go by their suffix; a ".bin" in a sub-folder may also be an asset, so its name and head decide."""
    suffix = path.suffix.lower()
    if suffix in _WEIGHT_SUFFIXES:
        return True
    if path.name.endswith((".safetensors.index.json", ".bin.index.json")):
        return path.as_posix() != INDEX
    if suffix != ".bin":
        return False
    if len(path.parts) == 1 or path.name.startswith(_WEIGHT_STEMS):
        return True
    with inside(folder, str(path)).open("rb") as stream:
        return stream.read(4).startswith(_TORCH_MAGIC)
