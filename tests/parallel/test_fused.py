"""The engine's own kernels against the same steps in plain torch: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu(optional=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x_SBHD: torch.Tensor, angles_SBA: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Pairs of numbers as complex ones, turned by their angle."""
    size = 2 * angles_SBA.shape[-1]
    turned, rest = x_SBHD[..., :size], x_SBHD[..., size:]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    moved = (
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles_SBA), angles_SBA)[:, :, None]
    )
    pairs = torch.view_as_real(moved)
    turned = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat((turned, rest), dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "size", "rotary", "interleaved", "normed", "own_positions"),
    [
        (2, 16, 16, False, True, False),
        (1, 16, 16, False, False, True),
        (3, 24, 8, False, True, True),
        (2, 16, 8, True, True, False),
        (7, 8, 8, True, False, False),
    ],
)
def test_heads_are_split_normalised_and_rotated(
    queries: int, size: int, rotary: int, interleaved: bool, normed: bool, own_positions: bool, dtype: torch.dtype
) -> None:
    from dlm_bridge.parallel.fused.qk_norm_rope import HeadLayout, split_qkv

    torch.manual_seed(0)
    length, batch, groups = 9, 3, 2
    mixed = torch.randn(length, batch, groups, (queries + 2) * size, device=DEVICE).to(dtype).requires_grad_()
    weights = [(torch.randn(size, device=DEVICE) + 1).to(dtype).requires_grad_() for _ in range(2 if normed else 0)]
    angles = torch.rand(length, batch if own_positions else 1, rotary // 2, device=DEVICE) * 40
    table = torch.stack((angles.cos(), angles.sin()), dim=2)
    heads = HeadLayout(queries, size, 1e-5, interleaved)
    found = split_qkv(mixed, table, *(weights or (None, None)), heads)
    leaves = [mixed, *weights]

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    parts = exact[0].unflatten(-1, (-1, size))
    query, key, value = parts[:, :, :, :queries].flatten(2, 3), parts[:, :, :, queries], parts[:, :, :, queries + 1]
    if normed:
        query, key = normalised(query, exact[1], 1e-5), normalised(key, exact[2], 1e-5)
    expected = [rotated(x, angles.double(), interleaved) for x in (query, key)] + [value]

    upstream = [torch.randn_like(x) for x in found]
    gradients = torch.autograd.grad(found, leaves, upstream)
    exact_gradients = torch.autograd.grad(expected, exact, [x.double() for x in upstream])
    for one, other in zip((*found, *gradients), (*expected, *exact_gradients), strict=True):
        assert one.shape == other.shape
        assert one.is_contiguous()
        assert distance(one, other) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("sizes", [(16, 5008), (5001, 0, 7, 4096)])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_adam_clips_and_rounds(half: torch.dtype | None, sizes: tuple[int, ...]) -> None:
    """Parameters of sizes that are and are not read several numbers at once, which move between steps."""
    from dlm_bridge.parallel.fused.optimizer_step import AdamSettings, FusedParamGroup, StepTensors

    torch.manual_seed(0)
    weights = [torch.randn(size, device=DEVICE) for size in sizes]
    expected = [weight.double().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(expected, lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    averages, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    halves = [None if half is None else torch.empty_like(weight, dtype=half) for weight in weights]
    group = FusedParamGroup()
    for step in range(1, 4):
        gradients = [torch.randn_like(weight) for weight in weights]
        share = torch.rand(1, device=DEVICE)
        for one, gradient in zip(expected, gradients, strict=True):
            one.grad = gradient.double() * share
        optimizer.step()
        fields = zip(weights, gradients, halves, averages, squares, strict=True)
        group.adam_step([StepTensors(*each) for each in fields], share, AdamSettings(0.01, 0.9, 0.95, 1e-6, 0.1, step))
        averages = [average.clone() for average in averages]
    for weight, exact, rounded in zip(weights, expected, halves, strict=True):
        assert not weight.numel() or distance(weight, exact) < 1e-6
        if rounded is not None and weight.numel():
            assert distance(rounded, weight.double()) < 8e-3  # the interpreter cuts off
            assert DEVICE == "cpu" or torch.equal(rounded, weight.to(rounded.dtype))


def test_gradient_descent_clips_and_rounds() -> None:
    from dlm_bridge.parallel.fused.optimizer_step import FusedParamGroup, StepTensors

    weights = [torch.randn(5001, device=DEVICE), torch.randn(64, device=DEVICE)]
    gradients = [torch.randn(5001, device=DEVICE).bfloat16(), torch.randn(64, device=DEVICE)]
    share, rounded = torch.tensor(0.3, device=DEVICE), torch.empty_like(gradients[0])
    pairs = list(zip(weights, gradients, strict=True))
    expected = [
        weight.double() - 0.01 * (share * gradient.double() + 0.1 * weight.double()) for weight, gradient in pairs
    ]
    parameters = [StepTensors(weights[0], gradients[0], rounded), StepTensors(weights[1], gradients[1])]
    FusedParamGroup().sgd_step(parameters, share, 0.01, 0.1)
    assert distance(weights[0], expected[0]) < 1e-6
    assert distance(weights[1], expected[1]) < 1e-6
    assert distance(rounded, expected[0]) < 8e-3


@pytest.mark.parametrize("gradient", [torch.zeros(6), torch.zeros(5, 2)[:, 0]])
def test_a_step_of_tensors_that_do_not_lie_alike_is_refused(gradient: torch.Tensor) -> None:
    from dlm_bridge.parallel.fused.optimizer_step import FusedParamGroup, StepTensors

    with pytest.raises(ValueError, match="gradient: not 5 contiguous"):
        FusedParamGroup().sgd_step([StepTensors(torch.zeros(5), gradient)], torch.ones(()), 0.01, 0.1)


@pytest.mark.parametrize("adam", [True, False])
def test_megatron_cores_step_is_taken_by_the_kernels(adam: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Transformer Engine's state, which a checkpoint then has, and straight from the model's gradients."""
    pytest.importorskip("megatron.core")
    from dlm_bridge.parallel.mcore_patches import fused_step
    from dlm_bridge.parallel.platform import Platform

    monkeypatch.setattr(Platform, "uses_fused_kernels", lambda self: True)
    model, alone = torch.randn(6, 5, device=DEVICE).bfloat16(), torch.randn(4, device=DEVICE)
    main_param = model.float()
    model.main_grad, alone.main_grad = torch.randn_like(model), torch.randn_like(alone)  # type: ignore[attr-defined]
    expected = [x.detach().double().requires_grad_() for x in (main_param, alone)]
    for one, gradient in zip(expected, (model.main_grad, alone.main_grad), strict=True):  # type: ignore[attr-defined]
        one.grad = gradient.double() * 0.5
    if adam:
        torch.optim.AdamW(expected, lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1).step()
    else:
        torch.optim.SGD(expected, lr=0.01, weight_decay=0.1).step()

    inner = (FusedAdam if adam else FusedSGD)([main_param, alone])
    part = SimpleNamespace(
        optimizer=inner,
        float16_groups=[[model]],
        fp32_from_float16_groups=[[main_param]],
        fp32_from_fp32_groups=[[alone]],
        grad_scaler=None,
        prepare_grads=lambda: pytest.fail("gradients were copied"),
        _copy_main_params_to_model_params=lambda: pytest.fail("rounded twice"),
    )
    found = fused_step.FusedOptimizerStep.of(part)
    assert found is not None
    assert not found.prepare_grads()
    with found.clipping(torch.tensor(0.5, device=DEVICE)):
        part.optimizer.step()
        part._copy_main_params_to_model_params()
    assert distance(main_param, expected[0]) < 1e-6
    assert distance(alone, expected[1]) < 1e-6
    assert distance(model, expected[0]) < 8e-3
    if adam:
        assert inner.param_groups[0]["step"] == 1
        assert inner.state[main_param]["exp_avg"].any()
        inner.capturable = True
    else:
        inner.param_groups[0]["momentum"] = 0.9
    assert fused_step.FusedOptimizerStep.of(part) is None


class FusedAdam:
    """What is read and called of Transformer Engine's."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.adam_w_mode, self.capturable, self.master_weights, self.use_decoupled_grad = 1, False, False, False
        self.name_to_dtype_map = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "master_param": torch.float32}
        group = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": True}
        self.param_groups: list[dict[str, Any]] = [{"params": parameters, **group}]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)

    def initialize_state(self, parameter: torch.Tensor, remainders: bool) -> None:
        self.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}

    def step(self) -> None:
        pytest.fail("its own step was taken")


class FusedSGD(FusedAdam):
    """So of its gradient descent."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        group = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
        self.param_groups = [{"params": parameters, **group}]
        self.state = defaultdict(dict)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found.double() - expected).norm() / expected.norm()).detach())
