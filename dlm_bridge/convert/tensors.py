"""Tensors as bytes: dtype names, exact casts, digests, and positioned reads and writes without a second copy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

from dlm_bridge.convert.memory import new_tensor
from dlm_bridge.errors import DlmBridgeError

# The dtypes that a weight can have, in the order in which safetensors sorts them inside a file (widest first).
SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
WEIGHT_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_DTYPES.values()
}
CAST_DTYPES: dict[str, torch.dtype | None] = {
    "keep": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_ONE_CALL = 1 << 30  # Linux moves at most 2 GiB in one call
# What cp writes at once too. Linux takes memory for a file in pieces as large as the call: large ones cost much more
# where the machine is a virtual one, since the pages that it freed last, and still has, are small ones.
_ONE_WRITE = 64 << 10


def parse_dtype(choice: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that `--dtype` names, None where the stored one is kept. Raises DlmBridgeError."""
    if choice is None or isinstance(choice, torch.dtype):
        return choice
    if choice not in CAST_DTYPES:
        raise DlmBridgeError(f"--dtype {choice}: choose one of {', '.join(CAST_DTYPES)}")
    return CAST_DTYPES[choice]


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def digest(tensor: torch.Tensor) -> str:
    """xxh3_128 of the tensor's raw bytes in row-major order, as hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(raw_bytes(tensor))


def bytes_digest(data: bytes) -> str:
    """xxh3_128 of some bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> str:
    """xxh3_128 of a file."""
    state = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


def range_digest(path: Path, offset: int, length: int) -> str:
    """xxh3_128 of a file's bytes from `offset` on; of fewer than `length` where the file ends before."""
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while length and (chunk := stream.read(min(length, 1 << 20))):
            state.update(chunk)
            length -= len(chunk)
    return state.hexdigest()


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as whole numbers of the same width, which compare bit by bit."""
    return tensor.contiguous().view(_BITS[tensor.itemsize])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (so that NaN equals itself)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(bit_view(a), bit_view(b))


def promote(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds every value of all of `dtypes` exactly."""
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def cast(tensor: torch.Tensor, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    """`tensor` in `dtype` (None keeps its own), rounded to nearest.

    Raises DlmBridgeError where a finite value would become infinite: that is a loss of the weight, not a rounding.
    """
    if dtype is None or tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not torch.equal(
        torch.isfinite(result), torch.isfinite(tensor)
    ):
        raise DlmBridgeError(f"{name}: a value does not fit {dtype_name(dtype)} (it would become infinite)")
    return result


def narrow_exactly(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The inverse of a widening cast, bit for bit. Raises DlmBridgeError where bits would be lost."""
    if tensor.dtype == dtype:
        return tensor
    if (tensor.dtype, dtype) == (torch.float32, torch.bfloat16):
        bits = tensor.contiguous().view(torch.int32)
        exact = not bool((bits & 0xFFFF).any())  # bfloat16 is the upper half of float32, NaN payloads included
        result = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    else:
        result = tensor.to(dtype)
        exact = same_bits(result.to(tensor.dtype), tensor)
    if not exact:
        raise DlmBridgeError(
            f"{name}: its values were {dtype_name(dtype)} when imported and no longer fit: give --dtype"
        )
    return result


def read_into(path: Path, offset: int, view: memoryview) -> None:
    """Fill the view from the file's bytes at `offset`. Raises DlmBridgeError where the file ends before."""
    fd = os.open(path, os.O_RDONLY)
    try:
        read_at(fd, path, offset, view)
    finally:
        os.close(fd)


def read_at(fd: int, path: Path, offset: int, view: memoryview) -> None:
    """The same from an open file."""
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done : done + _ONE_CALL]], offset + done)
        if got == 0:
            raise DlmBridgeError(f"{path}: truncated: ends before byte {offset + len(view)}")
        done += got


def read_tensor(path: Path, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A new tensor from the file's bytes at `offset`."""
    tensor = new_tensor(shape, dtype)
    read_into(path, offset, raw_bytes(tensor))
    return tensor


def write_at(fd: int, data: memoryview | bytes | bytearray, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _ONE_WRITE], offset + done)
