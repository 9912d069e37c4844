"""Weight dtypes and byte sizes: names, parsing, exact casts. torch is imported on first use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlm_bridge.errors import SettingError
from dlm_bridge.settings import check_choice

if TYPE_CHECKING:
    import torch

    SAFETENSORS_DTYPES: dict[str, torch.dtype]  # by safetensors' names
    SAFETENSORS_NAMES: dict[torch.dtype, str]  # the inverse
    WEIGHT_DTYPES: dict[str, torch.dtype]  # by torch's names

# Dtypes of weights by safetensors' name: torch's name and bytes per value, in the order in which safetensors sorts
# tensors inside a file (widest first).
STORED_DTYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}
QUANTISED_DTYPES = {  # of the parts of quantised weights
    "I64": ("int64", 8), "I32": ("int32", 4), "F8_E4M3": ("float8_e4m3fn", 1), "I8": ("int8", 1), "U8": ("uint8", 1)
}  # fmt: skip
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
    """torch's dtype for a name in `STORED_DTYPES` or `QUANTISED_DTYPES`."""
    import torch

    dtype: torch.dtype = getattr(torch, (STORED_DTYPES | QUANTISED_DTYPES)[stored][0])
    return dtype


def header_name(dtype: torch.dtype) -> str:
    """Name of a dtype in a safetensors header. Inverse of `torch_dtype`."""
    name = dtype_name(dtype)
    return next(stored for stored, (known, _) in (STORED_DTYPES | QUANTISED_DTYPES).items() if known == name)


def check_dtype(choice: str | torch.dtype | None) -> None:
    """Raise SettingError for a name that `parse_dtype` does not know; does not import torch."""
    if isinstance(choice, str):
        check_choice("dtype", choice, CAST_DTYPES)


def parse_dtype(choice: str | torch.dtype | None) -> torch.dtype | None:
    """torch's dtype for a value of the setting `dtype`, None for "keep". Raises SettingError."""
    check_dtype(choice)
    if choice is None or not isinstance(choice, str):
        return choice
    import torch

    name = CAST_DTYPES[choice]
    return None if name is None else getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """View of the tensor's elements as integers of the same width, for bitwise comparison."""
    import torch

    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.itemsize]
    return tensor.contiguous().view(whole)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors are equal in dtype, shape and every bit (NaN equals the same NaN)."""
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(bit_view(a), bit_view(b))


def promote(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that represents every value of all `dtypes` exactly."""
    import torch

    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def cast(tensor: torch.Tensor, dtype: torch.dtype | None, name: str) -> torch.Tensor:
    """Cast `tensor` to `dtype` (None: unchanged), rounding to nearest. `name`: the tensor's name in errors.

    Raises SettingError if a finite value would become infinite.
    """
    import torch

    if dtype is None or tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not torch.equal(
        torch.isfinite(result), torch.isfinite(tensor)
    ):
        raise SettingError("dtype", f"a value of {name} does not fit {dtype_name(dtype)} (it would become infinite)")
    return result


def narrow_exactly(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Invert a widening cast bit for bit. Raises SettingError if values changed so that bits would be lost."""
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
        raise SettingError(
            "dtype",
            f"choose one: the values of {name} were {dtype_name(dtype)} when imported and no longer fit that dtype",
        )
    return result


def parse_size(text: str | int | None, field: str = "shard_size") -> int | None:
    """Parse a size in bytes: "5GB" is 5 * 10**9, "5GiB" is 5 * 2**30. Raises SettingError for the setting `field`."""
    if text is None or isinstance(text, int):
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise SettingError(field, f"{text} is not a size such as 5GB or 500MB")
    unit = match[2].upper()
    size = int(float(match[1]) * (_BINARY_UNITS[unit] if match[3] else _UNITS[unit]))
    if size < 1:
        raise SettingError(field, f"{text} must be at least one byte")
    return size
