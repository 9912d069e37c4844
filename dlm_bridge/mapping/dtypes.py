"""Weight dtypes and byte sizes: names, parsing, exact casts. Imports torch where a dtype or a tensor is asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlm_bridge.errors import DlmBridgeError

if TYPE_CHECKING:
    import torch

    SAFETENSORS_DTYPES: dict[str, torch.dtype]  # by safetensors' names
    SAFETENSORS_NAMES: dict[torch.dtype, str]  # the inverse
    WEIGHT_DTYPES: dict[str, torch.dtype]  # by torch's names

# The dtypes that a weight can have, by safetensors' names, with torch's and their bytes; in the order in which
# safetensors sorts them inside a file (widest first).
STORED_DTYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
QUANTISED_DTYPES = {"F8_E4M3": ("float8_e4m3fn", 1), "U8": ("uint8", 1)}  # those of parts of quantised weights
CAST_DTYPES = {"keep": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def __getattr__(name: str) -> Any:
    if name not in ("SAFETENSORS_DTYPES", "SAFETENSORS_NAMES", "WEIGHT_DTYPES"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    dtypes = {stored: torch_dtype(stored) for stored in STORED_DTYPES}
    tables = {
        "SAFETENSORS_DTYPES": dtypes,
        "SAFETENSORS_NAMES": {dtype: stored for stored, dtype in dtypes.items()},
        "WEIGHT_DTYPES": {dtype_name(dtype): dtype for dtype in dtypes.values()},
    }
    globals().update(tables)
    return tables[name]


def torch_dtype(stored: str) -> torch.dtype:
    """That of a name in `STORED_DTYPES` or `QUANTISED_DTYPES`."""
    import torch

    dtype: torch.dtype = getattr(torch, (STORED_DTYPES | QUANTISED_DTYPES)[stored][0])
    return dtype


def parse_dtype(choice: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that `--dtype` names, None where the stored one is kept. Raises DlmBridgeError."""
    if choice is None or not isinstance(choice, str):
        return choice
    if choice not in CAST_DTYPES:
        raise DlmBridgeError(f"--dtype {choice}: choose one of {', '.join(CAST_DTYPES)}")
    import torch

    name = CAST_DTYPES[choice]
    return None if name is None else getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as whole numbers of the same width, which compare bit by bit."""
    import torch

    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize]
    return tensor.contiguous().view(whole)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (so that NaN equals itself)."""
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(bit_view(a), bit_view(b))


def promote(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds every value of all of `dtypes` exactly."""
    import torch

    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def cast(tensor: torch.Tensor, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    """`tensor` in `dtype` (None keeps its own), rounded to nearest.

    Raises DlmBridgeError where a finite value would become infinite: that is a loss of the weight, not a rounding.
    """
    import torch

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
    import torch

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
