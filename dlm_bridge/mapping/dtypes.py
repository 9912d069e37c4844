"""Weight dtypes and byte sizes: names, parsing, exact casts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

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
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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


def parse_size(text: str | int | None, option: str = "--shard-size") -> int | None:
    """ "5GB" is 5 * 10**9 bytes and "5GiB" 5 * 2**30, as the Hub writes sizes. Raises DlmBridgeError."""
    if text is None or isinstance(text, int):
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise DlmBridgeError(f"{option} {text}: write a size such as 5GB or 500MB")
    unit = match[2].upper()
    size = int(float(match[1]) * (_BINARY_UNITS[unit] if match[3] else _UNITS[unit]))
    if size < 1:
        raise DlmBridgeError(f"{option} {text}: must be at least one byte")
    return size
