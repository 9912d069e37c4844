"""Initialisation from scratch: each tensor is a pure function of (seed, Hub tensor name).

A family's rule gives the distribution of every tensor by its Hub name; engines and layouts only decide which tensors,
or which slices of them, they need. Every run with one seed starts from the same values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlm_bridge.errors import DlmBridgeError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Normal:
    """Normal distribution with mean 0; with `cutoff`, truncated to that many standard deviations by resampling."""

    std: float
    cutoff: float | None = None


@dataclass(frozen=True)
class Constant:
    """One value for every element: one for a norm, zero for a bias."""

    value: float


Distribution = Normal | Constant
InitialisationRule = Callable[[str], Distribution]  # by Hub tensor name


def initialise(name: str, shape: tuple[int, ...], distribution: Distribution, seed: int) -> torch.Tensor:
    """The initial value of the Hub tensor `name`, fp32, drawn on the CPU from (seed, name) alone. Raises
    DlmBridgeError for a tensor that memory cannot hold."""
    import numpy as np
    import torch

    if isinstance(distribution, Constant):
        return torch.full(shape, distribution.value, dtype=torch.float32)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    try:
        values = generator.standard_normal(shape, dtype=np.float32)
    except (MemoryError, ValueError) as error:  # the latter for a size beyond 64 bits
        sizes = " x ".join(f"{size:,}" for size in shape)
        raise DlmBridgeError(f"{name}, {sizes} by the sizes of its config, cannot be made: {error}") from None
    if distribution.cutoff is not None:
        flat = values.reshape(-1)
        outside = np.flatnonzero(np.abs(flat) > distribution.cutoff)
        while outside.size:
            flat[outside] = generator.standard_normal(outside.size, dtype=np.float32)
            outside = outside[np.abs(flat[outside]) > distribution.cutoff]
    values *= np.float32(distribution.std)
    return torch.from_numpy(values)


def initializer_range(config: Mapping[str, Any], key: str = "initializer_range") -> float:
    """The standard deviation of new weights, 0.02 where the config has none. Raises DlmBridgeError for one that is not
    a finite number of at least 0."""
    value = config.get(key)
    if value is None:
        return 0.02
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise DlmBridgeError(f"config.json: {key} must be a number of at least 0, not {value!r}")
    return float(value)


def normal_rule(config: dict[str, Any]) -> InitialisationRule:
    """The rule of transformers and of most families: N(0, `initializer_range`), norms one, biases zero."""
    std = initializer_range(config)

    def distribution(name: str) -> Distribution:
        if name.endswith("bias"):
            return Constant(0.0)
        return Constant(1.0) if name.endswith("norm.weight") else Normal(std)

    return distribution
