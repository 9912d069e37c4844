"""Initialisation from scratch: each tensor is a pure function of (seed, Hub tensor name).

A family's rule maps Hub names to distributions; engines and layouts only determine which tensors or slices they need.
Runs with the same seed start from the same values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlm_bridge.errors import CheckpointError, ResourceError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Normal:
    """Normal distribution with mean 0; with `cutoff`, truncated at `cutoff` standard deviations by resampling."""

    std: float
    cutoff: float | None = None


@dataclass(frozen=True)
class Constant:
    """Constant for every element, such as 1 for a norm and 0 for a bias."""

    value: float


Distribution = Normal | Constant
InitialisationRule = Callable[[str], Distribution]  # by Hub tensor name


def initialise(name: str, shape: tuple[int, ...], distribution: Distribution, seed: int) -> torch.Tensor:
    """Initial value of the Hub tensor `name`, fp32, drawn on the CPU from (seed, name) alone. Raises ResourceError for
    a tensor that does not fit into memory."""
    import numpy as np
    import torch

    if isinstance(distribution, Constant):
        return torch.full(shape, distribution.value, dtype=torch.float32)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    try:
        values = generator.standard_normal(shape, dtype=np.float32)
    except (MemoryError, ValueError) as error:  # ValueError: more than 2^63 elements
        sizes = " x ".join(f"{size:,}" for size in shape)
        raise ResourceError(name, f"has the shape {sizes} by its config, which cannot be allocated: {error}") from None
    if distribution.cutoff is not None:
        flat = values.reshape(-1)
        outside = np.flatnonzero(np.abs(flat) > distribution.cutoff)
        while outside.size:
            flat[outside] = generator.standard_normal(outside.size, dtype=np.float32)
            outside = outside[np.abs(flat[outside]) > distribution.cutoff]
    values *= np.float32(distribution.std)
    return torch.from_numpy(values)


def initializer_range(config: Mapping[str, Any], key: str = "initializer_range") -> float:
    """Standard deviation of initial weights, 0.02 by default. Raises CheckpointError unless it is finite and at
    least 0."""
    value = config.get(key)
    if value is None:
        return 0.02
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise CheckpointError("config.json", f"{key} must be a number of at least 0, not {value!r}")
    return float(value)


def normal_rule(config: dict[str, Any]) -> InitialisationRule:
    """Rule of transformers and of most families: N(0, `initializer_range`), ones for norms, zeros for biases."""
    std = initializer_range(config)

    def distribution(name: str) -> Distribution:
        if name.endswith("bias"):
            return Constant(0.0)
        return Constant(1.0) if name.endswith("norm.weight") else Normal(std)

    return distribution
