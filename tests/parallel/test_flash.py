"""Which layers of the Megatron engine get FlashAttention 4, and that it computes what they computed without."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_bridge.attention import flash_attention
from dlm_bridge.errors import SettingError
from tests.attention import flash_standin as standin
from tests.refusals import refused

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has FlashAttention 4, which takes all heads, and a platform that computes there."""
    monkeypatch.setattr("dlm_bridge.parallel.core_attention._flash_missing", lambda: None)
    monkeypatch.setattr(flash_attention, "unsupported_heads", lambda *_: None)
    monkeypatch.setattr(flash_attention, "kernels", lambda: (standin.forward, standin.backward))


def _config(backend: str, **fields: Any) -> Any:
    from dlm_bridge.parallel.core import AttnBackend, TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        attention_dropout=fields.pop("attention_dropout", 0.0),
        attention_backend=AttnBackend[backend],
        **fields,
    )


def _layer(backend: str, mask: str, ranks: int = 1, **fields: Any) -> Any:
    from dlm_bridge.parallel.attention import MASK_TYPES
    from dlm_bridge.parallel.core_attention import LocalAttention

    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    groups = SimpleNamespace(cp=group, tp=group)
    return LocalAttention(_config(backend, **fields), 1, MASK_TYPES[mask], "self", pg_collection=groups)


@pytest.mark.parametrize("mask", ["bidirectional", "causal"])
def test_a_layer_computes_what_it_computed_without(mask: str, there: None) -> None:
    """Of a value within a fused product; with a mask the call is as it was."""
    generator = torch.Generator().manual_seed(0)
    product = torch.randn(12, 3, 2, 32, generator=generator, requires_grad=True)  # [S, B, G, (2 + 1 + 1) * D]
    query, key, value = (part.unflatten(-1, (-1, 8)).flatten(2, 3) for part in product.split([16, 8, 8], dim=-1))
    found, wanted = (_layer(backend, mask) for backend in ("auto", "fused"))
    assert found.flash
    assert not wanted.flash
    outputs = [layer(query, key, value, None) for layer in (found, wanted)]
    assert outputs[0].shape == (12, 3, 32)
    assert outputs[0].is_contiguous()
    seed = torch.randn(12, 3, 32, generator=generator)
    gradients = [torch.autograd.grad(output, product, seed, retain_graph=True)[0] for output in outputs]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    pairs = torch.rand(3, 1, 12, 12, generator=generator) < 0.8
    assert torch.equal(found(query, key, value, pairs), wanted(query, key, value, pairs))


def test_packed_documents_are_each_for_itself(there: None) -> None:
    from dlm_bridge.parallel.batch import PackedDocuments
    from dlm_bridge.parallel.core_attention import flash_rows, is_flash_call

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(12, heads, 8, generator=generator) for heads in (4, 2, 2))
    packed = PackedDocuments(torch.tensor([0, 5, 12], dtype=torch.int32), 7).params()
    assert is_flash_call(packed, None)
    found = flash_rows(query, key, value, 0.3, True, packed)
    for part in (slice(0, 5), slice(5, 12)):
        alone = [tensor[part, None] for tensor in (query, key, value)]
        torch.testing.assert_close(found[part], flash_rows(*alone, 0.3, True)[:, 0])
    packed.cu_seqlens_q_padded = packed.cu_seqlens_q
    assert not is_flash_call(packed, None)
    assert not is_flash_call(None, torch.zeros(()))


@pytest.mark.parametrize(
    ("mask", "ranks", "fields", "named"),
    [
        ("block_causal", 1, {}, "block-causal"),
        ("causal", 2, {}, "`cp`"),
        ("causal", 1, {"window_size": (3, 0)}, "sliding window"),
        ("causal", 1, {"deterministic_mode": True}, "deterministic"),
    ],
)
def test_what_it_would_ignore_goes_elsewhere_or_is_refused(
    mask: str, ranks: int, fields: dict[str, Any], named: str, there: None
) -> None:
    assert not _layer("auto", mask, ranks, **fields).flash
    assert not _layer("unfused", mask, ranks, **fields).flash
    with refused(SettingError, "attention_backend", "flash", named):
        _layer("flash", mask, ranks, **fields)


def test_a_setting_of_transformer_engine_alone(there: None) -> None:
    from dlm_bridge.parallel.core import AttnMaskType
    from dlm_bridge.parallel.core_attention import unsupported, uses_flash

    config = _config("flash", attention_dropout=0.1)
    with refused(SettingError, "attention_backend", "attention_dropout"):
        uses_flash(config, AttnMaskType.causal, None, unsupported(config), 1)


def test_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = "dlm_bridge.parallel.core_attention.platform.current"
    monkeypatch.setattr(platform, lambda: SimpleNamespace(name="cpu"))
    with refused(SettingError, "attention_backend", "cpu"):
        _layer("flash", "causal")
    monkeypatch.setattr(platform, lambda: SimpleNamespace(name="cuda"))
    monkeypatch.setattr(
        flash_attention, "missing", lambda: "flash-attn-4 is not installed: pip install 'dlm-bridge[flash]'"
    )
    assert not _layer("auto", "causal").flash
    with refused(SettingError, "attention_backend", "flash-attn-4"):
        _layer("flash", "causal")
    monkeypatch.setattr(flash_attention, "missing", lambda: None)
    assert not _layer("auto", "causal").flash  # in fp32
    with refused(SettingError, "attention_backend", "float32"):
        _layer("flash", "causal")
