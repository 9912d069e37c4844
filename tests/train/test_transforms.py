"""The parts of a fast step: the loss at the loss positions, bf16 params, compiled layers, deferred metrics."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dlm_bridge.errors import MissingExtraError, NonFiniteError
from dlm_bridge.models.modeling_a2d import A2DQwen3Config, A2DQwen3LMHeadModel
from dlm_bridge.objectives.base import divisors
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.single_stream import MaskedDiffusion
from dlm_bridge.train.accelerate.attention import replace_sdpa, sdpa_repeated_kv_forward
from dlm_bridge.train.accelerate.transforms import (
    HalfPrecisionParams,
    LossHead,
    check_float8,
    compile_layers,
    loss_positions,
    normalised_positions,
)
from dlm_bridge.train.metrics import StepMetrics
from tests.families.case import all_cases
from tests.refusals import refused
from tests.train.conftest import Run, read_metrics

CPU = torch.device("cpu")
MASK = 95


def _model(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = A2DQwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=MASK + 1,
        tie_word_embeddings=tied,
        mask_token_id=MASK,
    )
    return A2DQwen3LMHeadModel(config).train()


def _batch(step: int = 1, rows: int = 4) -> NoisyBatch:
    ids = torch.randint(0, MASK, (rows, 16), generator=torch.Generator().manual_seed(step))
    return MaskedDiffusion(MASK).noise(ids, Uniforms.keyed(0, step, range(rows), 16))


def _plain_loss(model: Any, batch: NoisyBatch, shares: torch.Tensor) -> torch.Tensor:
    """Of the logits of every position, term by term."""
    logits = model(input_ids=batch.input_ids).logits[batch.mask]
    losses = F.cross_entropy(logits.float(), batch.targets, reduction="none") * batch.weights
    terms = torch.zeros_like(batch.targets) if batch.terms is None else batch.terms
    return (losses / shares[terms]).sum()


def _gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max()) or 1.0
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=tolerance * scale, msg=name)


def _two_terms(batch: NoisyBatch) -> NoisyBatch:
    values = vars(batch) | {
        "terms": torch.arange(len(batch.targets)) % 2,
        "normaliser": torch.tensor([7.0, 3.0], dtype=torch.float64),
    }
    return NoisyBatch(**values)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("kind", ["tied", "untied", "biased", "adapter"])
def test_loss_and_gradients_are_those_of_plain_logits(kind: str, terms: int) -> None:
    """Also where the output layer is more than a product with one weight, and as its logits stay what they were."""
    model = _model(tied=kind == "tied")
    if kind == "biased":
        model.lm_head = nn.Linear(32, MASK + 1)
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    batch = _batch() if terms == 1 else _two_terms(_batch())
    shares = divisors(batch.normaliser)
    expected = _plain_loss(model, batch, shares)
    wanted = _gradients(model, expected)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids).logits
    head = LossHead(model)
    loss, sums = head.loss(model, normalised_positions(loss_positions(batch), shares, CPU), input_ids=batch.input_ids)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert sums.shape == (terms,)
    assert sums.sum().item() == pytest.approx(expected.item(), rel=1e-6)
    _same(_gradients(model, loss), wanted, 1e-5)
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch.input_ids).logits, logits)


@pytest.mark.parametrize("kind", ["plain", "biased"])
def test_the_z_loss_is_the_mean_over_the_loss_positions(kind: str) -> None:
    model, batch = _model(), _two_terms(_batch())
    if kind == "biased":
        model.lm_head = nn.Linear(32, MASK + 1)
    logits = model(input_ids=batch.input_ids).logits[batch.mask]
    counts = batch.weights != 0
    assert counts.sum() > 3
    shares = torch.cat([divisors(batch.normaliser), counts.sum()[None].float()])
    expected = _plain_loss(model, batch, shares[:-1]) + 0.3 * logits.logsumexp(-1)[counts].square().mean()
    wanted = _gradients(model, expected)
    head, chosen = LossHead(model), normalised_positions(loss_positions(batch), shares, CPU, 0.3)
    loss, sums = head.loss(model, chosen, input_ids=batch.input_ids)
    assert sums.shape == (3,)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    _same(_gradients(model, loss), wanted, 1e-5)


@pytest.mark.parametrize("kind", ["plain", "biased"])
def test_the_second_sum_is_balanced_row_by_row(kind: str) -> None:
    model, batch = _model(), _two_terms(_batch())
    if kind == "biased":
        model.lm_head = nn.Linear(32, MASK + 1)
    rows = batch.mask.nonzero()[:, 0]
    losses = F.cross_entropy(model(input_ids=batch.input_ids).logits[batch.mask], batch.targets, reduction="none")
    weights, shares = batch.weights.clone(), divisors(batch.normaliser)
    for row in rows.unique():
        first, second = (losses * weights / shares[batch.terms] * (batch.terms == term) for term in (0, 1))
        weights[(rows == row) & (batch.terms == 1)] *= (first[rows == row].sum() / second[rows == row].sum()).detach()
    expected = _plain_loss(model, replace(batch, weights=weights), shares)
    wanted = _gradients(model, expected)
    chosen = normalised_positions(loss_positions(replace(batch, rows=rows)), shares, CPU)
    loss, sums = LossHead(model).loss(model, chosen, input_ids=batch.input_ids)
    assert sums.tolist() == pytest.approx([expected.item() / 2] * 2, rel=1e-5)
    _same(_gradients(model, loss), wanted, 1e-5)


def test_no_position_gives_no_loss_and_no_gradient() -> None:
    model = _model()
    batch = _batch()
    nothing = {"mask": torch.zeros_like(batch.mask), "targets": batch.targets[:0], "weights": batch.weights[:0]}
    chosen = normalised_positions(loss_positions(NoisyBatch(**(vars(batch) | nothing))), torch.ones(1), CPU)
    loss, sums = LossHead(model).loss(model, chosen, input_ids=batch.input_ids)
    assert loss.item() == sums.item() == 0.0
    assert all(not gradient.any() for gradient in _gradients(model, loss).values())


def test_half_weights_hand_their_gradients_over() -> None:
    """Two micro-batches: each weight's gradient is the fp32 sum of those of a model in bf16; then a refresh."""
    model, alone = _model(), _model().bfloat16()
    alone.model.rotary_emb = _model().model.rotary_emb  # buffers stay as they are
    half = HalfPrecisionParams(model)
    assert half.model.config is model.config
    assert half.model.lm_head.weight is half.model.model.embed_tokens.weight
    assert {weight.dtype for weight in half.model.parameters()} == {torch.bfloat16}
    wanted: dict[str, torch.Tensor] = {}
    for step in (1, 2):
        batch = _batch(step)
        shares = divisors(batch.normaliser)
        _plain_loss(half.model, batch, shares).backward()
        gradients = _gradients(alone, _plain_loss(alone, batch, shares))
        wanted = {name: gradient.float() + wanted.get(name, 0) for name, gradient in gradients.items()}
    _same({name: weight.grad for name, weight in model.named_parameters()}, wanted, 0.0)
    assert all(weight.grad is None for weight in half.model.parameters())
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    half.refresh()
    for (_, weight), (_, copy) in zip(model.named_parameters(), half.model.named_parameters(), strict=True):
        assert torch.equal(copy, weight.bfloat16())


def test_routers_and_frozen_weights_are_shared(tmp_path: Path) -> None:
    case = next(case for case in all_cases() if case.name == "llada2_moe")
    model = case.load(case.write(tmp_path / "model"))
    model.lm_head.weight.requires_grad = False
    half = HalfPrecisionParams(model)
    found = {name: weight.dtype for name, weight in half.model.named_parameters()}
    assert {dtype for name, dtype in found.items() if name.endswith("mlp.gate.weight")} == {torch.float32}
    assert found["lm_head.weight"] == torch.bfloat16
    assert half.model.model.layers[1].mlp.gate.weight is model.model.layers[1].mlp.gate.weight
    half.model(torch.arange(32)[None]).logits.float().sum().backward()
    assert model.lm_head.weight.grad is None
    assert model.model.layers[0].self_attn.o_proj.weight.grad.dtype == torch.float32


@pytest.mark.slow
def test_compiled_layers_train_as_plain_ones_under_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward graphs by AOTAutograd, and activation checkpointing around them."""
    compiler = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiler)
    torch._dynamo.reset()
    counters.clear()
    plain, compiled, batch = _model(), _model(), _batch()
    compiled.activation_checkpointing_enable({"use_reentrant": False})
    assert compile_layers(compiled) == 3
    shares = divisors(batch.normaliser)
    wanted = _gradients(plain, _plain_loss(plain, batch, shares))
    _same(_gradients(compiled, _plain_loss(compiled, batch, shares)), wanted, 1e-5)
    assert counters["stats"]["unique_graphs"] == 2  # of the layers and of the last norm


@pytest.mark.parametrize("causal", [False, True])
def test_repeated_heads_give_the_attention_of_groups(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a whole model, forward and backward, also compiled; and transformers' own function is back afterwards."""
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    plain, repeated, batch = _model(), _model(), _batch()
    for model in (plain, repeated):
        model.config.is_causal = causal
        for layer in model.model.layers:
            layer.self_attn.is_causal = causal
    shares = divisors(batch.normaliser)
    wanted = _gradients(plain, _plain_loss(plain, batch, shares))
    with replace_sdpa(sdpa_repeated_kv_forward):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not usual
        _same(_gradients(repeated, _plain_loss(repeated, batch, shares)), wanted, 1e-5)
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
        compile_layers(repeated)
        _same(_gradients(repeated, _plain_loss(repeated, batch, shares)), wanted, 1e-5)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


def test_a_compiled_run_is_the_run(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine, by what `--compile` asks for; the checkpoint has the Hub's names all the same."""
    plain = run(tmp_path / "plain", steps=3)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    compiled = run(tmp_path / "compiled", steps=3, compile=True)
    assert counters["stats"]["unique_graphs"] > 0
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in compiled] == pytest.approx([row[key] for row in plain], rel=1e-4)
    names = [
        set(load_file(tmp_path / folder / "checkpoints/step-0000003/model.safetensors"))
        for folder in ("plain", "compiled")
    ]
    assert names[0] == names[1]


def test_a_nan_loss_stops_the_run_and_names_its_step(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures come a step late: the row before is written, the step is named, and nothing is saved."""
    original = LossHead.loss
    calls: list[int] = []

    def broken(self: LossHead, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(1)
        loss, sums = original(self, *args, **kwargs)
        return (loss * torch.nan, sums * torch.nan) if len(calls) == 3 else (loss, sums)

    monkeypatch.setattr(LossHead, "loss", broken)
    with refused(NonFiniteError, "step 3", "loss is nan"):
        run(tmp_path / "run", steps=8, eval_interval=0, save_interval=4)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert set(rows[0]) >= set(json.loads(StepMetrics(1, 0.0, 0.0, 0.0, 0, 0.0, 0.0, None).to_json()))
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_fp8_is_refused_by_name_where_it_cannot_run(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with refused(MissingExtraError, "precision", "fp8"):
            run(tmp_path / "run", precision="fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    with refused(MissingExtraError, "precision", "torchao", "dlm-bridge[fp8]"):
        check_float8()
