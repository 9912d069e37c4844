"""What a step asks of all tokens of a position: which is the best, and how probable one is."""

from __future__ import annotations

import functools
from types import ModuleType

import torch


def best_token(logits_ANV: torch.Tensor, without: int) -> torch.Tensor:
    """[A, N], the highest logit's token but `without`, the first of equal ones."""
    kernels = _kernels() if logits_ANV.is_cuda else None
    if kernels is not None and kernels.serves(logits_ANV):
        tokens_AN: torch.Tensor = kernels.best_token(logits_ANV, without)
        return tokens_AN
    logits_ANV = logits_ANV.clone()
    logits_ANV[..., without] = -torch.inf
    return logits_ANV.argmax(dim=-1)


def probability_of(
    tokens_AN: torch.Tensor, logits_ANV: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[A, N], softmax(logits) at the tokens, computed in `dtype`, by default that of the logits.

    In half precision what is summed is float32, and the probability is rounded.
    """
    kernels = _kernels() if logits_ANV.is_cuda and dtype in (None, logits_ANV.dtype) else None
    if kernels is not None and kernels.serves(logits_ANV):
        probabilities_AN: torch.Tensor = kernels.probability_of(tokens_AN, logits_ANV)
        return probabilities_AN
    return logits_ANV.softmax(dim=-1, dtype=dtype).gather(-1, tokens_AN[..., None])[..., 0]


@functools.cache
def _kernels() -> ModuleType | None:
    """The module of the Triton kernels. None where there is no Triton."""
    try:
        from dlm_bridge.generation.execution import reductions
    except ImportError:
        return None
    return reductions
