"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from dlm_bridge.errors import DlmBridgeError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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
