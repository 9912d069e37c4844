"""Context parallelism: its sizes, its communication, and which positions each rank holds. Needs no megatron-core."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import Dims

# Our names: megatron-core's.
CP_COMMUNICATION = {"p2p": "p2p", "a2a": "a2a", "allgather": "all_gather", "a2a+p2p": "a2a+p2p"}


@dataclass(frozen=True)
class ContextParallelConfig:
    """Context parallelism: it shards sequences and not weights, so that no checkpoint depends on it.

    Raises DlmBridgeError for invalid sizes; `check` for those that do not fit a model.
    """

    cp: int = 1
    cp_comm_type: str = "p2p"  # of Transformer Engine; with mask descriptors keys and values are gathered
    hierarchical_cp_sizes: tuple[int, ...] | None = None  # (inner, outer) of a2a+p2p

    def __post_init__(self) -> None:
        if type(self.cp) is not int or self.cp < 1:
            raise DlmBridgeError(f"--cp must be a positive whole number, not {self.cp!r}")
        if self.cp_comm_type not in CP_COMMUNICATION:
            known = ", ".join(CP_COMMUNICATION)
            raise DlmBridgeError(f"--cp-comm-type {self.cp_comm_type!r} is unknown: known are {known}")
        sizes = self.hierarchical_cp_sizes
        if (self.cp_comm_type == "a2a+p2p") != (sizes is not None):
            raise DlmBridgeError(
                "--cp-comm-type a2a+p2p and --hierarchical-cp-sizes go together: give both or neither"
            )
        if sizes is not None and (len(sizes) != 2 or min(sizes) < 1 or math.prod(sizes) != self.cp):
            written = ",".join(map(str, sizes))
            raise DlmBridgeError(
                f"--hierarchical-cp-sizes {written}: two sizes are needed, inner and outer, whose product is --cp "
                f"{self.cp}"
            )

    def check(self, dims: Dims, layout: Layout) -> None:
        """Raise DlmBridgeError where the sizes do not fit a model."""
        if self.cp == 1 or self.cp_comm_type not in ("a2a", "a2a+p2p"):
            return
        ranks = self.hierarchical_cp_sizes[0] if self.hierarchical_cp_sizes else self.cp
        for what, heads in (("attention heads", dims.heads), ("query groups (key/value heads)", dims.groups)):
            if heads // layout.tp % ranks:
                raise DlmBridgeError(
                    f"--cp-comm-type {self.cp_comm_type} deals {heads // layout.tp} {what} of a tensor parallel rank "
                    f"to {ranks} ranks, which do not divide them: use p2p or allgather, or another --cp"
                )

    def world_size(self, layout: Layout) -> int:
        """The fewest ranks for both, with one data parallel replica."""
        return layout.pp * math.lcm(layout.tp * self.cp, layout.ep * layout.expert_tp)


def rank_positions(length: int, cp_size: int, streams: int = 1) -> torch.Tensor:
    """[cp, S] the positions of a row of `length` that each context parallel rank holds, in the order in which it holds
    them, which is Transformer Engine's: of 2 cp equal chunks rank r has chunks r and 2 cp - 1 - r, so that causal
    attention is as much work on every rank. Each of several streams, one after the other, is dealt on its own.

    Raises DlmBridgeError where the chunks would not be equal.
    """
    chunks = 2 * cp_size if cp_size > 1 else 1
    if length % (streams * chunks):
        raise DlmBridgeError(
            f"--seq-length {length // streams} is not a multiple of {chunks}, which --cp {cp_size} deals it out in: "
            "change one of them"
        )
    if cp_size == 1:
        return torch.arange(length)[None]
    dealt = torch.arange(length).view(streams, chunks, -1)
    first = torch.arange(cp_size)
    return torch.stack((dealt[:, first], dealt[:, chunks - 1 - first]), dim=2).transpose(0, 1).reshape(cp_size, -1)
