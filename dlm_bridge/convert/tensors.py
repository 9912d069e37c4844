"""Tensors as bytes: dtype names, exact casts, digests, and positioned reads and writes without a second copy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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
_MANY = 512  # buffers in one call; Linux takes 1024
_BAND = 1 << 20  # bytes that fit a core's cache, so that what is hashed is still there when it is written


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
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def digest(tensor: torch.Tensor) -> str:
    """xxh3_128 of the tensor's raw bytes in row-major order, as hexadecimal digits."""
    state = xxhash.xxh3_128()
    for run in byte_runs(tensor):
        state.update(run)
    return state.hexdigest()


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
        while length and (chunk := stream.read(min(length, _BAND))):
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


def byte_runs(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, a few at a time; what lies apart is gathered in one buffer.

    A run must be used before the next one is asked for.
    """
    if tensor.is_contiguous():
        view = raw_bytes(tensor)
        yield from (view[start : start + _BAND] for start in range(0, len(view), _BAND))
        return
    row = tensor[0].numel() * tensor.itemsize
    if row > _BAND or (tensor[0].is_contiguous() and row > _BAND // 16):
        for part in tensor:
            yield from byte_runs(part)
        return
    rows = max(1, _BAND // row)
    buffer = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)
    bits = _BITS[tensor.itemsize]
    source, target = tensor.view(bits).numpy(), buffer.view(bits).numpy()  # numpy copies on this thread alone
    for start in range(0, len(tensor), rows):
        count = min(rows, len(tensor) - start)
        target[:count] = source[start : start + count]
        yield raw_bytes(buffer[:count])


def read_into(path: Path, offset: int, *views: memoryview) -> None:
    """Fill the views, one after the other, from the file's bytes at `offset`.

    Raises DlmBridgeError where the file ends before.
    """
    end = offset + sum(map(len, views))
    left = [view[start : start + _ONE_CALL] for view in views for start in range(0, len(view), _ONE_CALL)]
    left.reverse()
    fd = os.open(path, os.O_RDONLY)
    try:
        while left:
            got = os.preadv(fd, _next_call(left), offset)
            if got == 0:
                raise DlmBridgeError(f"{path}: truncated: ends before byte {end}")
            offset += got
            while got:
                view = left.pop()
                if len(view) > got:
                    left.append(view[got:])
                got -= min(got, len(view))
    finally:
        os.close(fd)


def read_tensor(path: Path, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A new tensor from the file's bytes at `offset`."""
    tensor = new_tensor(shape, dtype)
    read_into(path, offset, raw_bytes(tensor))
    return tensor


def read_window(path: Path, offset: int, window: torch.Tensor) -> None:
    """Fill a tensor, which may be a window of a larger one, from the file's bytes at `offset`, row by row."""
    if window.is_contiguous():
        read_into(path, offset, raw_bytes(window))
    elif window[0].is_contiguous() and window[0].nbytes >= _BAND // 16:
        read_into(path, offset, *map(raw_bytes, window))
    else:
        window.copy_(read_tensor(path, offset, window.dtype, window.shape))


def write_at(fd: int, data: memoryview | bytes | bytearray, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _ONE_CALL], offset + done)


def _next_call(left: list[memoryview]) -> list[memoryview]:
    """The last buffers of `left`, last first, that one call can fill."""
    views: list[memoryview] = []
    size = 0
    for view in reversed(left[-_MANY:]):
        if views and size + len(view) > _ONE_CALL:
            break
        views.append(view)
        size += len(view)
    return views
