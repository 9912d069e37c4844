"""Muon's update of one matrix, and the parameters that Muon updates, for both engines.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises the momentum of a weight matrix.
Its updates are scaled to the size of AdamW's (Moonshot AI, arXiv 2502.16982), so that AdamW's learning rate and weight
decay apply."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import nn

ADAMW_RMS = 0.2  # root mean square of AdamW's updates, to which Muon's are scaled
STEPS = 5  # of the iteration
PRECISION = torch.bfloat16  # of the iteration, and of the momentum that ranks gather for it
_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients: steepest at zero, singular values end in 0.7 to 1.2
_LEAST_NORM = 1e-7
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)(\.\w+)?\.weight$")  # routers, not `gate_proj`


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def muon_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that Muon updates: matrices with gradients, except embeddings, the head and routers.
    Stacked experts, 3-D tensors, are excluded too."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    excluded = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return {
        name
        for name, parameter in trained_parameters(model).items()
        if takes_muon(name, parameter.shape) and id(parameter) not in excluded
    }


def takes_muon(name: str, shape: Sequence[int]) -> bool:
    """True if Muon updates a parameter of a layer: matrices, except routers and the stacked biases of experts."""
    return len(shape) == 2 and not name.endswith("bias") and _ROUTER.search(name) is None


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Approximate nearest semi-orthogonal matrix, in `PRECISION`, by the Newton-Schulz iteration of
    `torch.optim.Muon`."""
    a, b, c = _QUINTIC
    wide = matrix.to(PRECISION)
    tall = matrix.shape[0] > matrix.shape[1]
    wide = wide.T if tall else wide
    wide = wide / wide.norm().clamp(min=_LEAST_NORM)
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


def muon_update(matrix: torch.Tensor) -> torch.Tensor:
    """Orthogonalised momentum, fp32, whose root mean square times `ADAMW_RMS` is that of AdamW's updates. Multiply it
    by the learning rate and `ADAMW_RMS`."""
    return orthogonalised(matrix).float() * math.sqrt(max(matrix.shape))
