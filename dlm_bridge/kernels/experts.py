"""Fused mixture of experts: routing, activation, and the weighted sum of the experts' outputs in few kernels.

transformers' router launches 15 to 20 kernels of one operation each. Its experts launch 13 in addition to their two
grouped matrix products; the weighted sum alone writes the outputs twice in float32. As in `layers`, a module is
replaced only if its forward pass with tiny weights returns the values of the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import grouped_mm, linear


class FusedExperts:
    """Forward pass of transformers' gated experts by grouped matrix products.

    Rows are sorted by expert, so that one grouped product computes all experts for any distribution of their loads.
    """

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        self._numbers = torch.arange(experts.num_experts, device=experts.gate_up_proj.device, dtype=torch.int32)
        self._key = torch.uint8 if experts.num_experts <= 256 else torch.int16  # radix sort makes one pass per byte

    def __call__(self, hidden_NH: torch.Tensor, experts_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the outputs of each token's K experts, [N, H].

        Args:
            hidden_NH: hidden states of N tokens.
            experts_NK: indices of the experts.
            weights_NK: routing weights of the experts.
        """
        numbers, order = experts_NK.flatten().to(self._key).sort(stable=True)
        ends = torch.searchsorted(numbers.int(), self._numbers, right=True, out_int32=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rows = hidden_NH[order // experts_NK.shape[1]]
        rows = grouped_mm(rows, self._experts.gate_up_proj.transpose(1, 2), offs=ends)
        rows = torch.ops.dlm_bridge.silu_and_mul(rows)
        rows = grouped_mm(rows, self._experts.down_proj.transpose(1, 2), offs=ends)
        output: torch.Tensor = torch.ops.dlm_bridge.sum_experts(rows, places, weights_NK)
        return output


class FusedRouter:
    """Forward pass of a sigmoid router with group-limited routing, as in GLM-4.5 and LLaDA2."""

    def __init__(self, router: Any) -> None:
        self._router = router
        self._settings = _router_settings(router)

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [N, E], and weights and indices [N, K] of each token's experts, for hidden states [..., H]."""
        router = self._router
        hidden_NH = hidden_states.view(-1, hidden_states.shape[-1])
        logits_NE = linear(hidden_NH.float(), router.weight.float())
        chosen = torch.ops.dlm_bridge.route_in_groups(logits_NE, router.e_score_correction_bias, *self._settings)
        return logits_NE, *chosen


def supports_grouped_experts(module: Any, dtype: torch.dtype) -> bool:
    """True if a module is transformers' gated experts with SiLU and `FusedExperts` supports its device and sizes."""
    weights: list[Any] = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(type(one) is nn.Parameter and one.dtype == dtype and one.dim() == 3 for one in weights):
        return False
    device = module.gate_up_proj.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    unit = 16 // dtype.itemsize  # a grouped product needs rows of a multiple of 16 bytes
    if any(one.shape[2] % unit for one in weights):
        return False
    if getattr(module.config, "_experts_implementation", None) != "grouped_mm":
        return False
    # Small integers, whose sums are exact in any order. silu(x) rounds to x for x = 0 and x >= 64.
    experts, wide = module.num_experts, torch.arange(2 * unit)
    number, inner = torch.arange(experts)[:, None, None], torch.arange(unit)
    gate, up = (
        (number + inner[:, None] * factor + wide // 2).remainder(3).to(dtype) * scale
        for factor, scale in ((1, 64), (2, 1))
    )
    down = (number + wide[:, None] // 2 + inner).remainder(2).to(dtype)
    rows = torch.eye(3, 2 * unit, dtype=dtype)
    chosen = torch.tensor([[1, 0], [0, experts - 1], [experts - 1, 1]]).remainder(experts)
    routing_weights = torch.tensor([[0.5, 0.25], [2, 1], [1, 0.5]])
    expected = torch.zeros(3, 2 * unit)
    for token, row in enumerate(rows.float()):
        for expert, weight in zip(chosen[token], routing_weights[token], strict=True):
            activated = (gate[expert].float() @ row) * (up[expert].float() @ row)
            expected[token] += weight * (down[expert].float() @ activated).to(dtype).float()
    tiny = {"gate_up_proj": torch.cat([gate, up], dim=1), "down_proj": down}
    try:
        found = functional_call(module, tiny, (rows, chosen, routing_weights))
    except Exception:  # experts of another class
        return False
    return isinstance(found, torch.Tensor) and found.dtype == dtype and torch.equal(found, expected.to(dtype))


def is_group_router(module: Any, formula: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """True if the module computes the same function as `FusedRouter`.

    Args:
        formula: `elementwise.route_in_groups_torch`.
    """
    tensors: list[Any] = [getattr(module, name, None) for name in ("weight", "e_score_correction_bias")]
    if not all(isinstance(one, torch.Tensor) for one in tensors) or tensors[0].dim() != 2:
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(*shape, generator=generator)
        for shape in (tensors[0].shape, tensors[1].shape, (5, tensors[0].shape[1]))
    )
    try:
        logits, weights, experts = functional_call(module, {"weight": weight, "e_score_correction_bias": bias}, (x,))
        expected = formula(linear(x, weight), bias, *_router_settings(module))
    except Exception:  # a router of another class
        return False
    # Sorted, because transformers returns a token's experts in any order.
    (found, found_order), (wanted, wanted_order) = (one.sort(dim=-1) for one in (experts, expected[1]))
    return (
        torch.equal(logits, linear(x, weight))
        and torch.equal(found, wanted)
        and torch.allclose(weights.gather(-1, found_order), expected[0].gather(-1, wanted_order), rtol=1e-6, atol=0)
    )


def _router_settings(router: Any) -> tuple[int, int, int, bool, float]:
    """Number of groups, groups per token, experts per token, True if the weights are normalised to a sum of one, and
    the scaling factor of the weights."""
    groups: tuple[int, int, int] = (router.num_group, router.topk_group, router.top_k)
    return *groups, bool(router.norm_topk_prob), float(router.routed_scaling_factor)
