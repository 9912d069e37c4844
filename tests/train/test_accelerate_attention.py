"""FlashAttention 4 in the Accelerate engine: what a model computes with it, who gets it, and who is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dlm_bridge.attention import flash_attention
from dlm_bridge.errors import SettingError
from dlm_bridge.objectives.base import divisors
from dlm_bridge.train.accelerate import trainer
from dlm_bridge.train.accelerate.attention import (
    attention_kernels,
    flash_attention_forward,
    layer_masks,
    replace_sdpa,
    uses_flash_attention,
)
from dlm_bridge.train.accelerate.transforms import compile_layers
from tests.attention import flash_standin as standin
from tests.refusals import refused
from tests.train.conftest import Run
from tests.train.test_transforms import _batch, _gradients, _model, _plain_loss, _same

CUDA = torch.device("cuda")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine that has FlashAttention 4, here also in fp32; one entry for each call of its forward."""
    made: list[int] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return standin.forward(*args, **kwargs)

    monkeypatch.setattr(flash_attention, "missing", lambda: None)
    monkeypatch.setattr(flash_attention, "unsupported_heads", lambda *_: None)
    monkeypatch.setattr(flash_attention, "HALF", (*flash_attention.HALF, torch.float32))
    monkeypatch.setattr(flash_attention, "kernels", lambda: (forward, standin.backward))
    return made


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.fast("False")
def test_a_model_computes_what_it_computed_without(
    causal: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain, and compiled in one graph a layer, which serves all three; transformers' function is back afterwards."""
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    plain, model, batch = _model(), _model(), _batch()
    for one in (plain, model):
        one.config.is_causal = causal
        for layer in one.model.layers:
            layer.self_attn.is_causal = causal
    shares = divisors(batch.normaliser)
    wanted = _gradients(plain, _plain_loss(plain, batch, shares))
    with replace_sdpa(flash_attention_forward):
        _same(_gradients(model, _plain_loss(model, batch, shares)), wanted, 1e-5)
        assert len(calls) == 3
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
        torch._dynamo.reset()
        counters.clear()
        compile_layers(model)
        for _ in range(2):
            _same(_gradients(model, _plain_loss(model, batch, shares)), wanted, 1e-5)
        assert len(calls) == 9
        assert counters["stats"]["unique_graphs"] == 2  # of the layers and of the last norm
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


def test_a_call_under_a_mask_is_sdpas(calls: list[int]) -> None:
    model, batch = _model(), _batch()
    mask = torch.ones_like(batch.input_ids)
    mask[:, -3:] = 0
    wanted = model(input_ids=batch.input_ids, attention_mask=mask).logits
    with replace_sdpa(flash_attention_forward):
        torch.testing.assert_close(model(input_ids=batch.input_ids, attention_mask=mask).logits, wanted)
    assert not calls


def test_whoever_can_gets_it(calls: list[int]) -> None:
    model = _model()
    assert uses_flash_attention(model, None, CUDA, "bf16")
    assert uses_flash_attention(model, "flash", CUDA, "bf16")
    assert not uses_flash_attention(model, "sdpa", CUDA, "bf16")
    assert not uses_flash_attention(model, None, torch.device("cpu"), "bf16")
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    for masked, taken in ((True, False), (False, True)):
        with attention_kernels(CUDA, masked, compiled=True, flash=True):
            assert (ALL_ATTENTION_FUNCTIONS["sdpa"] is not usual) is taken


def test_who_is_refused(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    _refused(model, "dropout")
    model = _model()
    model.set_attn_implementation("eager")
    _refused(model, "eager")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    _refused(_model(), "deterministic")
    monkeypatch.setattr(
        flash_attention, "missing", lambda: "flash-attn-4 is not installed: pip install 'dlm-bridge[flash]'"
    )
    _refused(_model(), "flash-attn-4")


def _refused(model: Any, said: str) -> None:
    assert not uses_flash_attention(model, None, CUDA, "bf16")
    with refused(SettingError, "attention_backend", said):
        uses_flash_attention(model, "flash", CUDA, "bf16")


def test_a_run_with_it_is_the_run(tmp_path: Path, run: Run, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine, by what `--attention-backend flash` asks for; on a CPU it is refused."""
    if not torch.cuda.is_available():
        with refused(SettingError, "attention_backend", "GPU"):
            run(tmp_path / "refused", steps=1, attention_backend="flash")
    plain = run(tmp_path / "plain", steps=2, length_variation=0.0)
    assert not calls
    monkeypatch.setattr(trainer, "uses_flash_attention", lambda *_: True)
    monkeypatch.setattr(trainer, "attention_kernels", lambda *_: replace_sdpa(flash_attention_forward))
    found = run(tmp_path / "flash", steps=2, length_variation=0.0, attention_backend="flash")
    assert calls
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in plain], rel=1e-4)


def test_masks_of_documents_keep_the_windows_of_layers() -> None:
    """By layer type where only some slide, in the one mask where all do, and not where the config's window is off."""
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    mask[..., 3:, :3] = False
    near = mask & ~torch.ones(6, 6, dtype=torch.bool).tril(-2)
    kinds = ["sliding_attention", "full_attention"]
    for settings, wanted in (
        ({"sliding_window": 2, "layer_types": kinds}, dict(zip(kinds, (near, mask), strict=True))),
        ({"sliding_window": 2, "layer_types": kinds[:1] * 2}, near),
        ({"sliding_window": 2}, near),
        ({"sliding_window": 2, "layer_types": kinds[1:] * 2}, mask),
        ({"sliding_window": None}, mask),
    ):
        found = layer_masks(mask, SimpleNamespace(_attn_implementation="sdpa", **settings), torch.float32)
        found, wanted = (masks if isinstance(masks, dict) else {"all": masks} for masks in (found, wanted))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[kind], wanted[kind]) for kind in wanted)
