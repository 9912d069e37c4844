"""Tokens on their way to experts by one all-gather: every rank gets every token and keeps those of its own experts.

With k experts a token and n ranks, an all-to-all moves k (n - 1) / n copies of each token, an all-gather n - 1: fewer
where n < k. megatron-core's own way of doing it asks the device twice in a layer how many tokens there are, after the
tokens were gathered, and adds up what comes back in the router's dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.parallel.core import (
    MoEAllGatherTokenDispatcher,
    gather_from_sequence_parallel_region,
    permute,
    reduce_scatter_to_sequence_parallel_region,
)


class GatherDispatcher(MoEAllGatherTokenDispatcher):
    """megatron-core's, but the counts are on their way to the CPU while the tokens are gathered."""

    routing_map: Any  # [T, E] bool of this rank's tokens, then [T * ranks, E] of all

    @classmethod
    def take_over(cls, model: torch.nn.Module) -> None:
        """Make these of all that a model has."""
        for module in model.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if type(dispatcher) is MoEAllGatherTokenDispatcher:
                dispatcher.__class__ = cls

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all ranks, [T * ranks, H] hidden states and [T * ranks, E] weights of experts."""
        together = self.tp_size > 1 or self.ep_size > 1
        if together:
            with torch.no_grad():
                self.routing_map = gather_from_sequence_parallel_region(self.routing_map, group=self.tp_ep_group)
        mine = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.local_map = self.routing_map[:, mine].contiguous()
        self._counts = _Counts(self.local_map.sum(dim=0))
        if together:
            probs = gather_from_sequence_parallel_region(probs, group=self.tp_ep_group)
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.tp_ep_group)
        return hidden_states, probs[:, mine].contiguous()

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those of this rank's experts, expert after expert: hidden states, how many each expert has, weights."""
        self.hidden_shape_before_permute = hidden_states.shape
        counts = self._counts.read()
        permuted, weights, self.reversed_local_input_permutation_mapping = permute(
            hidden_states,
            self.local_map,
            probs=probs,
            num_out_tokens=int(counts.sum()),
            fused=self.config.moe_permute_fusion,
        )
        self.routing_map = None
        return permuted, counts, weights

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H] this rank's tokens, what all ranks' experts made of them added up."""
        if self.tp_size > 1 or self.ep_size > 1:
            hidden_states = reduce_scatter_to_sequence_parallel_region(hidden_states, group=self.tp_ep_group)
        return hidden_states


class _Counts:
    """Numbers that are copied to the CPU behind nothing that is launched later."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._event: Any = None
        if counts.is_cuda:
            self._values = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._values.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = counts

    def read(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._values
