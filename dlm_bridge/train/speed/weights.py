"""fp32 weights for the optimizer and a copy of them in half precision for the model that computes."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import torch
from torch import nn


class HalfWeights:
    """A model whose weights stay in fp32, and `model`, the same one with copies of them in `dtype`.

    Autocast keeps what runs between the layers in fp32; a model in half precision moves half of the bytes there, as
    Megatron and FSDP do. Gradients go to the fp32 weights as soon as the copies' are whole, and are summed there over
    micro-batches; `refresh` brings the copies up to date after the optimizer has changed the weights. Buffers are
    copied as they are, the configuration is shared, and so are weights that are not in fp32 or that the model's
    class keeps as they are (routers).
    """

    def __init__(self, model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        memo: dict[int, Any] = {id(model.config): model.config}
        self._weights: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        kept = tuple(model._get_dtype_plan(dtype))
        for name, weight in model.named_parameters():
            if weight.dtype != torch.float32 or any(re.search(part, name) for part in kept):
                memo[id(weight)] = weight
                continue
            half = nn.Parameter(weight.detach().to(dtype), requires_grad=weight.requires_grad)
            if weight.requires_grad:
                half.register_post_accumulate_grad_hook(functools.partial(_hand_over, weight))
            self._weights.append(weight)
            self._copies.append(half)
            memo[id(weight)] = half
        self.model = copy.deepcopy(model, memo)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights that are trained."""
        pairs = [pair for pair in zip(self._copies, self._weights, strict=True) if pair[1].requires_grad]
        if pairs:
            copies, weights = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, weights)


def _hand_over(weight: torch.Tensor, half: torch.Tensor) -> None:
    assert half.grad is not None
    if weight.grad is None:
        weight.grad = half.grad.float()
    else:
        weight.grad += half.grad
    half.grad = None
