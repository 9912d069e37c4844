"""Value head of TraceRL's value model (`rl` with `value_model`), instead of the output layer."""

from __future__ import annotations

import torch
from torch import nn

from dlm_bridge.objectives.linear_cross_entropy import LossPositions
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import TransformerConfig, gather_from_sequence_parallel_region
from dlm_bridge.parallel.mcore_patches.modules import rows_at


class ValueHead(nn.Module):
    """Linear layer from a hidden state to a scalar value, initialised with zeros and replicated on all tensor parallel
    ranks.

    All ranks compute the values of all tokens, so that each has the full gradient of the weight and of the hidden
    states: unlike the output layer's, neither is summed over ranks.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        device = platform.current().device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, device=device, dtype=config.params_dtype))

    def forward(
        self,
        input_: torch.Tensor,
        weight: None = None,
        loss_positions: LossPositions | None = None,
        selected: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the weighted values at the loss positions, a scalar in fp32, and detached that sum [1], or the
        weighted values [M] if not `summed`.

        Arguments as in `OutputLayer.forward`; the loss positions are required.
        """
        assert loss_positions is not None
        if self.sequence_parallel:  # the backward pass takes this rank's part
            input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False)
        hidden_MH = input_.flatten(0, 1) if selected else rows_at(input_, loss_positions.positions)
        values_M = nn.functional.linear(hidden_MH.float(), self.weight.float())[:, 0]
        weighted_M = values_M * loss_positions.weights
        loss = weighted_M.sum()
        return loss, (loss[None] if loss_positions.summed else weighted_M).detach()
