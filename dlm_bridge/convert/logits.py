"""Do two checkpoints compute the same? The Hub-side models of both, on one fixed random input, in fp32."""

from __future__ import annotations

import os

import torch

from dlm_bridge.bridge import Bridge
from dlm_bridge.convert.opening import open_any, open_megatron
from dlm_bridge.convert.verify import Difference, Verdict
from dlm_bridge.errors import DlmBridgeError

TOLERANCE = 1e-5  # of the largest logit: the same weights give the same logits but for the order of additions
TOKENS = 32


def add_logits(verdict: Verdict, a: str | os.PathLike[str], b: str | os.PathLike[str]) -> None:
    """Add the comparison of both models' logits to a verdict; a difference makes it unequal."""
    try:
        verdict.logits = logits_difference(a, b)
    except DlmBridgeError as error:
        problem = Difference("logits", "unreadable", str(error))
    else:
        if verdict.logits <= TOLERANCE:
            return
        problem = Difference("logits", "values", f"they differ by {verdict.logits:.2e} of the largest")
    verdict.differences.append(problem)
    verdict.equal = False


def logits_difference(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> float:
    """The largest difference of two models' logits, as a fraction of the largest logit.

    Raises DlmBridgeError where either is not a whole model or their vocabularies differ.
    """
    first, second = _logits(a, b), _logits(b, a)
    if first.shape != second.shape:
        raise DlmBridgeError(f"{a} has {first.shape[-1]} tokens, {b} has {second.shape[-1]}")
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-30))


@torch.no_grad()
def _logits(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> torch.Tensor:
    """[1, TOKENS, V]. The model is gone on return, so that two never share the memory."""
    try:
        bridge = Bridge(open_any(path))
    except DlmBridgeError:  # a Megatron checkpoint without a manifest: the other names its model
        bridge = Bridge(open_megatron(path, like=other))
    model = bridge.build_hf_model(dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(bridge.dims.vocab, (1, TOKENS), generator=generator)
    return model(tokens).logits
