"""Weights from nothing: each tensor a pure function of (seed, Hub tensor name), whoever builds the model.

A family's rule names the distribution of every tensor under its Hub name; engines and layouts only decide which
tensors, or which slices of them, they need. So every run of one seed starts from the same values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dlm_bridge.models.family_spec import FamilySpec


@dataclass(frozen=True)
class Normal:
    """Mean 0 and `std`; values beyond `cutoff` standard deviations are drawn again, where it is given."""

    std: float
    cutoff: float | None = None


@dataclass(frozen=True)
class Constant:
    """The same value everywhere: one for a norm, zero for a bias."""

    value: float


Distribution = Normal | Constant
InitialisationRule = Callable[
    [str], Distribution
]  # by Hub tensor name; raises DlmBridgeError for a name that the family lacks


def initialise(name: str, shape: tuple[int, ...], distribution: Distribution, seed: int) -> torch.Tensor:
    """The initial value of the Hub tensor `name`, fp32, drawn on the CPU from (seed, name) alone."""
    if isinstance(distribution, Constant):
        return torch.full(shape, distribution.value, dtype=torch.float32)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    values = generator.standard_normal(shape, dtype=np.float32)
    if distribution.cutoff is not None:
        flat = values.reshape(-1)
        outside = np.flatnonzero(np.abs(flat) > distribution.cutoff)
        while outside.size:
            flat[outside] = generator.standard_normal(outside.size, dtype=np.float32)
            outside = outside[np.abs(flat[outside]) > distribution.cutoff]
    values *= np.float32(distribution.std)
    return torch.from_numpy(values)


def normal_rule(config: dict[str, Any]) -> InitialisationRule:
    """transformers' own rule, which most families publish: N(0, `initializer_range`), norms one, biases zero."""
    std = float(config.get("initializer_range", 0.02))

    def distribution(name: str) -> Distribution:
        if name.endswith("bias"):
            return Constant(0.0)
        return Constant(1.0) if name.endswith("norm.weight") else Normal(std)

    return distribution


def initial_weights(spec: FamilySpec, config: dict[str, Any], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every Hub tensor of a model with this config.json, one at a time. Raises DlmBridgeError for a config that the
    family cannot hold or an initialisation that it does not know."""
    mapping = spec.load("mapping")
    rule: InitialisationRule = spec.load("initialisation")(config)
    for param in mapping.params(mapping.dims(config)):
        if param.is_mtp:  # transformers' models do not have these layers
            continue
        for name, shape in zip(param.hub_names, param.hub_shapes, strict=True):
            yield name, initialise(name, shape, rule(name), seed)
