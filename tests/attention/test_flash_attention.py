"""FlashAttention 4 as an operation: against SDPA, with functions of its signatures on a CPU, itself on a GPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.attention import flash_attention
from tests.attention import flash_standin as standin

NEEDS_KERNELS = pytest.mark.skipif(flash_attention.missing() is not None, reason="needs FlashAttention 4 and its GPU")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "kernels", lambda: (standin.forward, standin.backward))


def _inputs(
    order: str, groups: int, length: int = 24, size: int = 8, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensors, Tensors]:
    """Leaves, and views of them [B, S, H, D] in the order in memory that an engine has."""
    generator = torch.Generator().manual_seed(0)
    leaves, views = [], []
    for heads in (4, groups, groups):
        shape = (2, length, heads, size) if order == "rows" else (length, 2, heads, size)
        if order == "within":  # one of the tensors that a fused product gives
            shape = (length, 2, heads, 3 * size)
        leaf = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        leaves.append(leaf)
        views.append(leaf if order == "rows" else leaf[..., -size:].transpose(0, 1))
    return (leaves[0], leaves[1], leaves[2]), (views[0], views[1], views[2])


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    q, k, v = (tensor.transpose(1, 2).float() for tensor in (query, key, value))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return found.transpose(1, 2)


def _same(
    found: torch.Tensor, wanted: torch.Tensor, leaves: Tensors, tolerance: float, seed: torch.Tensor | None = None
) -> None:
    """Outputs and gradients, apart by `tolerance` of the largest value at most."""
    seed = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)) if seed is None else seed
    seed = seed.to(wanted.device)
    got = torch.autograd.grad(found, leaves, seed.to(found.dtype), retain_graph=True)
    expected = torch.autograd.grad(wanted, leaves, seed.to(wanted.dtype), retain_graph=True)
    for one, other in zip((found, *got), (wanted, *expected), strict=True):
        one, other = one.detach().float(), other.detach().float()
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("order", ["rows", "positions", "within"])
def test_whole_sequences(order: str, groups: int, causal: bool, stand_in: None) -> None:
    leaves, (q, k, v) = _inputs(order, groups)
    found = flash_attention.flash_attention(q, k, v, 0.3, causal)
    _same(found, _sdpa(q, k, v, 0.3, causal), leaves, 1e-5)
    outermost = found if order == "rows" else found.transpose(0, 1)
    assert outermost.is_contiguous()  # so that nobody copies it


def test_a_gradient_that_is_one_number_is_written_out(stand_in: None) -> None:
    leaves, (q, k, v) = _inputs("positions", 2)
    one = torch.ones(()).expand(q.shape)
    _same(flash_attention.flash_attention(q, k, v, 0.3, False), _sdpa(q, k, v, 0.3, False), leaves, 1e-5, one)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents(causal: bool, stand_in: None) -> None:
    leaves, _ = _inputs("positions", 2)
    q, k, v = (leaf.flatten(0, 1) for leaf in leaves)
    bounds = [0, 5, 6, 30, 48]
    found = flash_attention.flash_attention(q, k, v, 0.3, causal, torch.tensor(bounds, dtype=torch.int32), 24)
    _same(found, _by_document(q, k, v, bounds, causal), leaves, 1e-5)


def _by_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], causal: bool) -> torch.Tensor:
    return torch.cat([_sdpa(q[None, a:b], k[None, a:b], v[None, a:b], 0.3, causal)[0] for a, b in pairwise(bounds)])


def test_a_compiled_function_has_it_as_one_operation(stand_in: None) -> None:
    leaves, views = _inputs("positions", 2)

    def around(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attention.flash_attention(q * 2, k + 1, v, 0.3, True).flatten(2).sin()

    compiled = torch.compile(around, backend="aot_eager", fullgraph=True)
    _same(compiled(*views), around(*views), leaves, 1e-6)


def test_it_is_an_operation_of_torch(stand_in: None) -> None:
    """Its schema, what it says of shapes and strides without computing, and its gradient, by torch's own checks."""
    for order in ("rows", "positions"):
        _, views = _inputs(order, 2)
        inputs = tuple(view.detach().requires_grad_() for view in views)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
        torch.library.opcheck(flash_attention._forward, (*inputs, 0.3, True, None, 0), test_utils=checks)


def test_recomputation_gives_the_same_gradients(stand_in: None) -> None:
    from torch.utils.checkpoint import checkpoint

    leaves, views = _inputs("positions", 2)
    again = checkpoint(flash_attention.flash_attention, *views, 0.3, True, use_reentrant=False)
    _same(again, flash_attention.flash_attention(*views, 0.3, True), leaves, 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a Hopper GPU, as far as can be seen from here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    flash_attention.missing.cache_clear()
    yield
    flash_attention.missing.cache_clear()


def test_why_it_is_missing(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise flash_attention.PackageNotFoundError(name)

    def broken() -> None:
        raise ImportError("no module named\ncutlass")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is not there is nobody's mistake
        monkeypatch.setattr(flash_attention, "version", absent)
        assert flash_attention.missing() == "flash-attn-4 is not installed: pip install 'dlm-bridge[flash]'"
    for version, kernels, said in (
        ("4.0.0b3", None, "flash-attn-4 is 4.0.0b3, only 4.0.0b36 is supported"),
        (flash_attention.VERSION, broken, "cannot be imported: no module named cutlass"),
    ):
        flash_attention.missing.cache_clear()
        monkeypatch.setattr(flash_attention, "version", lambda _, version=version: version)
        monkeypatch.setattr(flash_attention, "kernels", kernels)
        with pytest.warns(UserWarning, match=said):
            assert said in str(flash_attention.missing())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flash_attention.missing()  # once
    flash_attention.missing.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert "compute capability 9.0" in str(flash_attention.missing())


def test_heads_that_do_not_fit(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash_attention.unsupported_heads(128, torch.bfloat16) is None
    assert flash_attention.unsupported_heads(256, torch.float16) is None
    assert "not in float32" in str(flash_attention.unsupported_heads(128, torch.float32))
    assert "not 100" in str(flash_attention.unsupported_heads(100, torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert "up to 128 here, not 256" in str(flash_attention.unsupported_heads(256, torch.bfloat16))


@pytest.mark.gpu
@NEEDS_KERNELS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("order", ["rows", "positions", "within"])
@pytest.mark.parametrize("size", [128, 64])
def test_the_kernels_themselves(size: int, order: str, groups: int, causal: bool) -> None:
    """bf16 against fp32, in the order in memory of either engine; and again, by kernels that are compiled by now."""
    for length in (384, 1000, 384):
        leaves, (q, k, v) = _inputs(order, groups, length, size, "cuda", torch.bfloat16)
        found = flash_attention.flash_attention(q, k, v, size**-0.5, causal)
        _same(found, _sdpa(q, k, v, size**-0.5, causal), leaves, 2e-2)
        assert (found if order == "rows" else found.transpose(0, 1)).is_contiguous()


@pytest.mark.gpu
@NEEDS_KERNELS
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernels_themselves_with_one_row(causal: bool) -> None:
    """Whose stride is any number."""
    leaves, views = _inputs("positions", 2, 512, 128, "cuda", torch.bfloat16)
    q, k, v = (view[:1] for view in views)
    _same(flash_attention.flash_attention(q, k, v, 0.1, causal), _sdpa(q, k, v, 0.1, causal), leaves, 2e-2)


@pytest.mark.gpu
@NEEDS_KERNELS
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernels_themselves_on_packed_documents(causal: bool) -> None:
    leaves, _ = _inputs("positions", 2, 1024, 128, "cuda", torch.bfloat16)
    q, k, v = (leaf.flatten(0, 1) for leaf in leaves)
    bounds = [0, 300, 301, 1300, 2048]
    starts = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    found = flash_attention.flash_attention(q, k, v, 0.3, causal, starts, 999)
    _same(found, _by_document(q, k, v, bounds, causal), leaves, 2e-2)


@pytest.mark.gpu
@NEEDS_KERNELS
def test_the_kernels_themselves_in_a_compiled_function() -> None:
    leaves, (q, k, v) = _inputs("rows", 2, 512, 128, "cuda", torch.bfloat16)
    compiled = torch.compile(
        functools.partial(flash_attention.flash_attention, scale=0.1, causal=False), fullgraph=True
    )
    _same(compiled(q * 1, k * 1, v), _sdpa(q, k, v, 0.1, False), leaves, 2e-2)
