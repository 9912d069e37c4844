"""Loss at the loss positions, against torch's own cross-entropy of whole logits; on CUDA too where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.objectives import linear_cross_entropy as output_layer
from dlm_bridge.objectives.linear_cross_entropy import LossPositions, VocabShard, linear_cross_entropy
from dlm_bridge.objectives.losses import balanced_weights

SIZE, VOCAB, ROWS = 32, 101, 104  # the last three rows of the weight are padding
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="module")
def shard() -> Iterator[VocabShard]:
    """The whole vocabulary on one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield VocabShard(0, VOCAB, dist.group.WORLD)
    dist.destroy_process_group()


def _tensors(
    positions: int, device: torch.device, dtype: torch.dtype = torch.float32, terms: int = 1
) -> tuple[torch.Tensor, torch.nn.Parameter, LossPositions]:
    """Hidden states, a weight whose padding would win every softmax, and targets with some weights zero."""
    generator = torch.Generator().manual_seed(positions)
    hidden = torch.randn(positions, SIZE, generator=generator).to(device, dtype).requires_grad_()
    values = torch.randn(ROWS, SIZE, generator=generator)
    values[VOCAB:] = 50
    weights = torch.rand(positions, generator=generator) * (torch.arange(positions) % 7 != 3)
    of_term = torch.randint(0, terms, (positions,), generator=generator)
    targets = torch.randint(0, VOCAB, (positions,), generator=generator)
    tensors = [tensor.to(device) for tensor in (torch.arange(positions), targets, weights, of_term)]
    chosen = LossPositions(*tensors, terms) if terms > 1 else LossPositions(*tensors[:3])
    return hidden, torch.nn.Parameter(values.to(device, dtype)), chosen


def _expected(
    hidden: torch.Tensor, weight: torch.Tensor, chosen: LossPositions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted losses, and the gradients of hidden states and weight, in fp64."""
    h, w = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    losses = F.cross_entropy(h @ w[:VOCAB].t(), chosen.targets, reduction="none") * chosen.weights
    return losses.detach(), *torch.autograd.grad(losses.sum(), (h, w))


def _assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


# SIZE decides from how many positions on gradients are folded at once: 32 in fp32, 64 in half precision.
@pytest.mark.parametrize("positions", [1, 20, 150])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_loss_and_gradients_are_those_of_whole_logits(
    shard: VocabShard,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    positions: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 4 * VOCAB * 9)  # nine rows at a time, which divides nothing
    hidden, weight, chosen = _tensors(positions, device, dtype, terms=3)
    losses, grad_hidden, grad_weight = _expected(hidden, weight, chosen)
    loss, sums = linear_cross_entropy(hidden, weight, chosen, shard)
    assert (loss.dtype, loss.shape, sums.dtype, sums.requires_grad) == (torch.float32, (), torch.float32, False)
    _assert_close(loss.detach(), losses.sum(), 1e-5)
    of_terms = torch.stack([losses[chosen.terms == term].sum() for term in range(3)])
    _assert_close(sums, of_terms, 1e-5)
    (loss * 3).backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    _assert_close(hidden.grad, 3 * grad_hidden, tolerance)
    _assert_close(weight.grad, 3 * grad_weight, tolerance)
    assert not weight.grad[VOCAB:].any()


@pytest.mark.parametrize("positions", [20, 150])
def test_sums_are_balanced_row_by_row_without_a_gradient_of_the_factor(
    shard: VocabShard, device: torch.device, positions: int
) -> None:
    hidden, weight, chosen = _tensors(positions, device, terms=2)
    rows = torch.arange(positions, device=device) * 3 // positions
    losses, *_ = _expected(hidden, weight, chosen)
    weights = chosen.weights.double()
    for row in range(3):
        noisy, clean = ((rows == row) & (chosen.terms == term) for term in (0, 1))
        weights[clean] *= losses[noisy].sum() / losses[clean].sum()
    wanted, grad_hidden, grad_weight = _expected(hidden, weight, replace(chosen, weights=weights))
    balanced = replace(chosen, rows=rows, num_rows=3)
    loss, sums = linear_cross_entropy(hidden, weight, balanced, shard)
    loss.backward()
    for found in (loss.detach(), 2 * sums[0], 2 * sums[1]):  # one is as large as the other
        _assert_close(found, wanted.sum(), 1e-5)
    _assert_close(hidden.grad, grad_hidden, 1e-5)
    _assert_close(weight.grad, grad_weight, 1e-5)
    with torch.no_grad():
        _assert_close(linear_cross_entropy(hidden, weight, balanced, shard)[0], wanted.sum(), 1e-5)


def test_a_second_sum_of_zero_is_not_balanced() -> None:
    losses, terms, rows = torch.tensor([5.0, 3.0, 0.0, 2.0, 4.0]), torch.tensor([0, 0, 1, 0, 1]), [0, 0, 0, 1, 1]
    weights = balanced_weights(torch.ones(5), losses, terms, torch.tensor(rows), rows=3)
    assert weights.tolist() == [1, 1, 1, 1, 0.5]


@pytest.mark.parametrize("positions", [20, 150])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_weight_gradient_is_added_to_main_grad(
    shard: VocabShard, device: torch.device, positions: int, main_dtype: torch.dtype, tied: bool
) -> None:
    hidden, weight, chosen = _tensors(positions, device, torch.bfloat16)
    weight.main_grad = torch.ones(ROWS, SIZE, dtype=main_dtype, device=device)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = tied
    _, _, wanted = _expected(hidden, weight, chosen)
    loss, _ = linear_cross_entropy(hidden, weight, chosen, shard, accumulates=True)
    assert torch.equal(weight.main_grad, torch.ones_like(weight.main_grad))
    loss.backward()
    assert weight.grad_added_to_main_grad
    _assert_close(weight.main_grad, wanted + 1, 1e-2)
    assert torch.equal(weight.main_grad[VOCAB:], torch.ones_like(weight.main_grad[VOCAB:]))
    assert (weight.grad is None) is tied


def test_gradients_of_many_positions_do_not_underflow_in_half_precision(
    shard: VocabShard, device: torch.device
) -> None:
    """Each of the weights is one over the tokens of a global batch, and the loss is scaled afterwards."""
    for positions in (20, 150):
        hidden, weight, chosen = _tensors(positions, device, torch.float16)
        small = LossPositions(chosen.positions, chosen.targets, chosen.weights * 2**-24)
        _, grad_hidden, grad_weight = _expected(hidden, weight, chosen)
        loss, _ = linear_cross_entropy(hidden, weight, small, shard)
        (loss * 2**24).backward()
        _assert_close(hidden.grad, grad_hidden, 2e-3)
        _assert_close(weight.grad, grad_weight, 2e-3)


def test_only_what_needs_gradients_gets_them(shard: VocabShard, device: torch.device) -> None:
    for positions in (20, 150):
        hidden, weight, chosen = _tensors(positions, device)
        losses, grad_hidden, grad_weight = _expected(hidden, weight, chosen)
        with torch.no_grad():
            loss, sums = linear_cross_entropy(hidden, weight, chosen, shard)
        assert not loss.requires_grad
        _assert_close(loss, losses.sum(), 1e-5)
        _assert_close(sums, losses.sum()[None], 1e-5)
        linear_cross_entropy(hidden, weight.detach(), chosen, shard)[0].backward()
        _assert_close(hidden.grad, grad_hidden, 1e-5)
        assert weight.grad is None
        linear_cross_entropy(hidden.detach(), weight, chosen, shard)[0].backward()
        _assert_close(weight.grad, grad_weight, 1e-5)


def test_no_position_gives_zero_with_a_graph(shard: VocabShard, device: torch.device) -> None:
    hidden, weight, chosen = _tensors(0, device)
    loss, sums = linear_cross_entropy(hidden, weight, chosen, shard)
    assert (float(loss.detach()), sums.tolist()) == (0.0, [0.0])
    loss.backward()
    assert hidden.grad.shape == (0, SIZE)
    assert not weight.grad.any()


def test_a_chunk_never_holds_more_logits_than_the_limit(
    shard: VocabShard, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    product = output_layer._product

    def watched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = product(left, right)
        if found.shape[1] == ROWS:  # with the padding that aligns them
            seen.append(found.shape[0])
        return found

    monkeypatch.setattr(output_layer, "_product", watched)
    for rows, limit in ((1000, 300), (1000, 100), (256, 256), (5, 300)):
        seen.clear()
        monkeypatch.setattr(output_layer, "CHUNK_BYTES", 4 * ROWS * limit)
        with torch.no_grad():
            linear_cross_entropy(*_tensors(rows, device), shard)
        assert sum(seen) == rows
        assert max(seen) <= limit
        if limit >= output_layer.TILE:
            assert all(size % output_layer.TILE == 0 for size in seen[:-1])
