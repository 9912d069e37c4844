"""A LoRA adapter by the names of the Hub weights that it changes, from wherever it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.mapping import Link, Vocabulary
from dlm_bridge.errors import DlmBridgeError

Part = Literal["A", "B"]  # [rank, columns] and [rows, rank]; the weight gets scale * B @ A
PARTS: tuple[Part, Part] = ("A", "B")


@dataclass
class AdapterFacts:
    """What an adapter is besides its tensors. `modules` maps a changed Hub weight to the module's name in PEFT."""

    where: str
    rank: int
    alpha: float
    scale: float
    dtype: torch.dtype
    modules: dict[str, str]
    config: dict[str, Any]  # adapter_config.json
    folder: Path | None = None  # where the side files lie
    files: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


class Adapter(ABC):
    """Tensors are read when asked for."""

    facts: AdapterFacts

    @abstractmethod
    def tensor(self, weight: str, part: Part) -> torch.Tensor:
        """One factor of the change of a Hub weight. Raises DlmBridgeError."""

    def delta(self, weight: str) -> torch.Tensor:
        """scale * B @ A in fp32: what the adapter adds to a Hub weight."""
        a, b = (self.tensor(weight, part).float() for part in PARTS)
        return self.facts.scale * (b @ a)


def adapted_link(base: Checkpoint, weight: str, where: str) -> Link:
    """The link of a weight that an adapter may change. Raises DlmBridgeError for one that it may not."""
    link = base.link_of[weight]
    what = None
    if isinstance(link.rule, Vocabulary):
        what = "the embedding and the output layer, which"
    elif link.expert is not None:
        what = "routed experts, whose adapters"
    elif ".router." in link.rule.megatron:
        what = "a router, which"
    elif link.is_mtp:
        what = "a multi-token prediction layer, which"
    elif len(link.hub_shapes[0]) != 2:
        what = "what is no linear layer, which"
    if what:
        raise DlmBridgeError(f"{where}: changes {weight}, of {what} cannot be converted: train the adapter without it")
    return link


def check_shapes(base: Checkpoint, weight: str, a: tuple[int, ...], b: tuple[int, ...], rank: int, where: str) -> None:
    """Raise DlmBridgeError unless factors of these shapes change the base's weight."""
    rows, columns = base.spec(weight)[1]
    if a != (rank, columns) or b != (rows, rank):
        raise DlmBridgeError(
            f"{where}: its factors of {weight} have shapes {list(a)} and {list(b)}, a rank {rank} change of "
            f"{[rows, columns]} needs {[rank, columns]} and {[rows, rank]}: it is another model's adapter"
        )
