"""Noise of random tokens: the bound by the papers' formulas, its gradient in the fused output layer, its noise."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.evaluation.likelihood import Answer, bound_estimator, is_greedy
from dlm_bridge.models.families import family_by_name
from dlm_bridge.objectives.base import diffusion_loss, divisors
from dlm_bridge.objectives.linear_cross_entropy import LossPositions, VocabShard, linear_cross_entropy
from dlm_bridge.objectives.losses import NoisePositions, position_losses
from dlm_bridge.objectives.noise import NoiseProcess, Uniforms, random_tokens
from dlm_bridge.objectives.registry import build_objective, check_objective, family_objective, own_objective
from dlm_bridge.train.collator import DiffusionCollator
from tests.train.conftest import Run

MASK, VOCAB = 5, 12
CONFIG = SimpleNamespace(vocab_size=VOCAB)
PROCESSES = [NoiseProcess(), NoiseProcess(0.1), NoiseProcess(0.7)]


def _logits(input_ids: torch.Tensor) -> torch.Tensor:
    """[B, L, V] float64 of a toy denoiser."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)).double()
    return 2 * table[input_ids] + table[input_ids].mean(1, keepdim=True)


def _mixed(process: NoiseProcess, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GIDD's alpha_t, and its beta_t pi_t [V], over a vocabulary with the mask in it (section 4 of arXiv 2503.04482;
    of uniform noise, UDLM's)."""
    uniform = torch.ones(VOCAB, dtype=torch.float64)
    uniform[MASK] = 0
    uniform = uniform / uniform.sum()
    if process.p_uniform is None:
        return 1 - t, t * uniform
    bend = 2 * process.p_uniform / (1 - process.p_uniform)
    c = bend * t**0.5 * (1 - t) ** 0.5
    mask = torch.zeros(VOCAB, dtype=torch.float64)
    mask[MASK] = 1
    return (1 - t) / (1 + c), (t * mask + c * uniform) / (1 + c)


def _gidd_loss(process: NoiseProcess, t: float, logits: torch.Tensor, x: int, z: int) -> tuple[float, float]:
    """The weight and the divergences of one position by GIDD's equation, its derivatives by autograd."""
    level = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    alpha, noise = _mixed(process, level)
    (slope,) = torch.autograd.grad(alpha, level, retain_graph=True)
    (noise_slope,) = torch.autograd.grad(noise[z], level, retain_graph=True)
    prediction = torch.where(torch.arange(VOCAB) == MASK, -torch.inf, logits.double()).softmax(-1)
    clean = torch.eye(VOCAB, dtype=torch.float64)[x]
    q, p = (alpha * one + noise for one in (clean, prediction))
    weight = (noise_slope - slope / alpha * noise[z]) / q[z]
    kl = (torch.xlogy(q, q) - torch.xlogy(q, p)).sum()
    ratio = q[z] / p[z]
    return weight.item(), (kl + ratio - ratio.log() - 1).item()


def _udlm_loss(t: float, logits: torch.Tensor, x: int, z: int) -> float:
    """UDLM's continuous-time loss of a position, over the tokens without the mask (arXiv 2412.10193)."""
    rows = [token for token in range(VOCAB) if token != MASK]
    count, alpha = len(rows), 1 - t
    prediction = logits.double()[rows].softmax(-1)
    x, z = rows.index(x), rows.index(z)
    bar = count * alpha * torch.eye(count, dtype=torch.float64)[x] + 1 - alpha
    model = count * alpha * prediction + 1 - alpha
    inner = sum(bar[j] / bar[z] * torch.log(model[z] * bar[j] / (model[j] * bar[z])) for j in range(count))
    return (-1 / (count * alpha) * (count / bar[z] - count / model[z] - inner)).item()


@pytest.mark.parametrize(
    ("name", "weighting"), [("uniform", "bound"), ("uniform_hybrid", "bound"), ("uniform", "clipped")]
)
def test_the_loss_is_the_papers_written_out(name: str, weighting: str) -> None:
    objective = build_objective(name, MASK, config=CONFIG, loss_weighting=weighting)
    tokens = torch.randint(6, VOCAB, (3, 6), generator=torch.Generator().manual_seed(0))
    uniforms = Uniforms.keyed(seed=1, step=2, samples=[4, 5, 6], length=6)
    noisy = objective.noise(tokens, uniforms)
    assert noisy.mask.all()
    assert (noisy.input_ids != tokens).any()
    logits = _logits(noisy.input_ids)
    loss = objective.loss_sum(logits[noisy.mask], noisy) / noisy.normaliser
    expected = 0.0
    for row in range(3):
        u = uniforms.level[row].double().item()
        t = 0.001 + 0.999 * u if name == "uniform" else 1e-4 + (1 - 2e-4) * u
        for i in range(6):
            x, z = int(tokens[row, i]), int(noisy.input_ids[row, i])
            weight, divergences = _gidd_loss(objective.process, t, logits[row, i], x, z)  # type: ignore[attr-defined]
            expected += min(weight, 2.0 if weighting == "clipped" else weight) * divergences
            if name == "uniform":
                assert weight * divergences == pytest.approx(_udlm_loss(t, logits[row, i], x, z), rel=1e-9)
    assert loss.item() == pytest.approx(expected / 18, rel=1e-5)


@pytest.mark.parametrize("process", PROCESSES)
def test_the_expected_loss_of_the_best_model_is_the_entropy(process: NoiseProcess) -> None:
    """One token from a distribution: with that for x', the bound is tight. Over every token and noisy token, and t by
    the trapezoidal rule of u, t = u^3 (10 - 15 u + 6 u^2)."""
    data = _logits(torch.tensor([[1]]))[0, 0].masked_fill(torch.arange(VOCAB) == MASK, -torch.inf).softmax(-1)
    u = torch.linspace(0, 1, 4001, dtype=torch.float64)[1:-1]
    t, measure = u**3 * (10 - 15 * u + 6 * u**2), 30 * u**2 * (1 - u) ** 2 / 4000
    keep, masked, replaced = process.probabilities(t)
    torch.testing.assert_close(keep + masked + replaced, torch.ones_like(t))
    total = 0.0
    for x in range(VOCAB):
        for z in range(VOCAB):
            clean, noisy = torch.full_like(t, x).long(), torch.full_like(t, z).long()
            share = masked if z == MASK else replaced / (VOCAB - 1) + (keep if z == x else 0)
            if x == MASK or not share.any():
                continue
            weights = process.weights(t, clean, noisy, VOCAB - 1, MASK)
            spread = replaced / (VOCAB - 1)
            noise = NoisePositions(noisy, keep / spread, spread, MASK)
            losses = position_losses(data.log().expand(len(t), -1), clean, noise)
            total += float((data[x] * share * weights * losses * measure).sum())
    entropy = -float(torch.xlogy(data, data).sum())
    assert total == pytest.approx(entropy, rel=1e-3)


def test_dynamic_weights_are_the_bounds_without_the_factor_of_the_level() -> None:
    process = NoiseProcess(0.2)
    t = torch.rand(9, generator=torch.Generator().manual_seed(0)).double()
    clean = torch.full((9,), 3)
    for noisy, expected in ((MASK, 2.0), (4, 1.0)):
        tokens = torch.full((9,), noisy)
        dynamic = process.dynamic_weights(t, clean, tokens, 50_000, MASK)
        torch.testing.assert_close(dynamic, torch.full_like(t, expected))
        torch.testing.assert_close(process.weights(t, clean, tokens, 50_000, MASK) * 2 * t * (1 - t), dynamic)
    same = process.weights(t, clean, clean, 50_000, MASK) * 2 * t * (1 - t)
    torch.testing.assert_close(process.dynamic_weights(t, clean, clean, 50_000, MASK), same, rtol=1e-3, atol=0)


def test_where_no_signal_is_left_the_loss_is_none() -> None:
    """At noise level 1 - 2^-24 the weights are 10^7, and what is left of the divergences is rounding."""
    objective = build_objective("uniform", MASK, config=SimpleNamespace(vocab_size=50_000))
    uniforms = Uniforms.keyed(0, 1, [0], 64)
    highest = Uniforms(**{**vars(uniforms), "level": torch.tensor([1 - 2**-24])})
    noisy = objective.noise(torch.full((1, 64), 9), highest)
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0))
    assert noisy.weights.max() > 1e6
    assert (objective.loss_sum(logits, noisy).abs() / noisy.normaliser).item() < 1e-2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ["uniform", "uniform_hybrid"])
def test_the_fused_output_layer_has_the_same_loss_and_gradients(name: str, wide: bool, device: str) -> None:
    """Against autograd through logits; `wide`: with more rows than it keeps gradients of logits for."""
    generator = torch.Generator().manual_seed(0)
    rows = 100 if wide else 20
    objective = build_objective(name, MASK, config=CONFIG, loss_weighting="bound")
    noisy = objective.noise(
        torch.randint(6, VOCAB, (2, rows // 2), generator=generator), Uniforms.keyed(0, 1, [0, 1], rows // 2)
    ).to(torch.device(device))
    values = [torch.randn(size, 8, generator=generator).to(device) for size in (rows, VOCAB)]
    found = []
    for fused in (True, False):
        hidden, weight = (value.clone().requires_grad_() for value in values)
        if fused:
            positions = LossPositions(
                torch.arange(rows, device=device), noisy.targets, noisy.weights, noise=noisy.noise
            )
            loss, _ = linear_cross_entropy(hidden, weight, positions, VocabShard(0, VOCAB))
        else:
            loss = objective.loss_sum(hidden.double() @ weight.double().T, noisy)[0]
        loss.backward()
        found.append((loss.double(), hidden.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(*values, positions, VocabShard(0, VOCAB))[0], loss.float())


def test_padding_of_the_loss_positions_costs_nothing() -> None:
    logits, weight = torch.randn(3, VOCAB), torch.eye(VOCAB)
    zeros = torch.zeros(3)
    noise = NoisePositions(zeros.long(), zeros, zeros, MASK)
    positions = LossPositions(torch.arange(3), zeros.long(), zeros, noise=noise)
    hidden = logits.requires_grad_()
    loss, _ = linear_cross_entropy(hidden, weight, positions, VocabShard(0, VOCAB))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize("process", PROCESSES)
def test_noise_has_its_probabilities(process: NoiseProcess) -> None:
    name = "uniform" if process.p_uniform is None else "uniform_hybrid"
    objective = build_objective(name, MASK, config=CONFIG, p_uniform=process.p_uniform)
    count, tokens = 40_000, torch.full((1, 40_000), 7)
    uniforms = Uniforms.keyed(3, 1, [0], count)
    noisy = objective.noise(tokens, Uniforms(**{**vars(uniforms), "level": torch.tensor([0.5])})).input_ids
    shares = torch.bincount(noisy[0], minlength=VOCAB) / count
    if process.p_uniform is None:
        masked, replaced = 0.0, 0.5
    else:
        replaced = process.p_uniform
        masked = 0.5 * (1 - process.p_uniform)
    expected = torch.full((VOCAB,), replaced / (VOCAB - 1))
    expected[MASK] = masked
    expected[7] += 1 - masked - replaced
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.012)


def test_prompts_and_padding_keep_their_tokens() -> None:
    objective = build_objective("uniform", MASK, config=CONFIG)
    tokens = torch.randint(6, VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))
    labels, real = tokens.clone(), torch.ones_like(tokens)
    labels[:, :3] = -100
    real[:, 7] = 0
    noisy = objective.noise(tokens, Uniforms.keyed(0, 1, range(4), 8), labels, real)
    assert torch.equal(noisy.input_ids[:, :3], tokens[:, :3])
    assert torch.equal(noisy.input_ids[:, 7], tokens[:, 7])
    assert (noisy.mask == ((labels != -100) & (real == 1))).all()
    assert noisy.normaliser.item() == 16


def test_random_tokens_without_a_mask_token_are_all_of_them() -> None:
    uniform = (torch.arange(1200, dtype=torch.float64) + 0.5) / 1200
    assert torch.bincount(random_tokens(uniform, 12, -1)).tolist() == [100] * 12
    counts = torch.bincount(random_tokens(uniform, 12, MASK), minlength=12)
    assert counts[MASK] == 0
    assert (counts > 100).sum() == 11


def test_a_loss_from_a_generator() -> None:
    objective = build_objective("uniform_hybrid", MASK, config=CONFIG)
    tokens = torch.randint(6, VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))

    def forward(logits_to_keep: torch.Tensor, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return _logits(input_ids)[logits_to_keep]

    losses = [
        diffusion_loss(forward, objective, tokens, tokens, torch.Generator().manual_seed(seed)).item()
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]
    noisy = objective.noise(tokens, Uniforms.drawn(torch.Generator().manual_seed(1), 2, 5, replaces=True), tokens)
    sums = objective.loss_sum(_logits(noisy.input_ids)[noisy.mask], noisy)
    assert losses[0] == pytest.approx((sums / divisors(noisy.normaliser)).item())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "uniform", "config": None}, "vocab_size"),
        ({"name": "uniform", "loss_weighting": "level"}, "^loss_weighting"),
        ({"name": "uniform", "p_uniform": 0.1}, "^p_uniform"),
        ({"name": "masked", "p_uniform": 0.1}, "^p_uniform"),
        ({"name": "uniform", "noise_range": (0.3, 0.8)}, "^noise_range"),
        ({"name": "masked", "loss_weighting": "bound"}, "^loss_weighting"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DlmBridgeError, match=message):
        build_objective(mask_token_id=MASK, **{"config": CONFIG, **arguments})


def test_a_family_of_shifted_logits_or_blocks_is_refused() -> None:
    for name in ("dream", "sdar", "qwen2"):
        with pytest.raises(DlmBridgeError, match="uniform"):
            check_objective("uniform", family_by_name(name))
    check_objective("uniform_hybrid", family_by_name("llada"))


def test_a_config_names_its_noise() -> None:
    llada = family_by_name("llada")
    assert own_objective(SimpleNamespace(), llada) == "masked"
    assert own_objective(SimpleNamespace(noise_process="hybrid", p_uniform=0.3), llada) == "uniform_hybrid"
    for fraction in (None, 1.5, "0.3"):
        with pytest.raises(DlmBridgeError, match="p_uniform"):
            own_objective(SimpleNamespace(noise_process="hybrid", p_uniform=fraction), llada)
    with pytest.raises(DlmBridgeError, match="noise_process 'gaussian'"):
        own_objective(SimpleNamespace(noise_process="gaussian"), llada)
    embedding = SimpleNamespace(weight=torch.zeros(VOCAB, 1))
    config = SimpleNamespace(noise_process="hybrid", p_uniform=0.3, vocab_size=VOCAB, mask_token_id=MASK)
    model = SimpleNamespace(config=config, family=llada, get_input_embeddings=lambda: embedding)
    objective = family_objective(model)
    assert (objective.model_config, objective.mask_token_id) == ({"noise_process": "hybrid", "p_uniform": 0.3}, MASK)


def test_a_model_is_trained_sampled_and_bounded(tmp_path: Path, run: Run) -> None:
    """Its checkpoint says what noise it knows; nothing samples, continues or bounds it otherwise."""
    options = {"objective": "uniform_hybrid", "p_uniform": 0.3, "steps": 4, "eval_interval": 4}
    whole = run(tmp_path / "whole", **options)
    cut = run(tmp_path / "cut", micro_batch_size=2, **options)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in cut] == pytest.approx([row[key] for row in whole], rel=1e-4)
    assert cut[-1]["eval_loss"] == pytest.approx(whole[-1]["eval_loss"], rel=1e-4)
    folder = tmp_path / "whole/checkpoints/step-0000004"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.noise_process, model.config.p_uniform) == ("hybrid", 0.3)
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"].clone()), with_kwargs=True)
    text = model.generate(torch.tensor([[9, 8]]), gen_length=12, steps=3, seed=0, eos_token_id=None)
    mask = model.config.mask_token_id
    assert (seen[0][0, 2:] == mask).all()
    assert (len(seen), (text == mask).any().item()) == (3, False)
    with pytest.raises(DlmBridgeError, match=r"^algorithm: llada .*hybrid"):
        model.generate(torch.tensor([[9, 8]]), algorithm="llada")
    with pytest.raises(DlmBridgeError, match="entropy_bound"):
        model.generate(torch.tensor([[9, 8]]), gen_length=12, resampling="entropy_bound")
    assert "hybrid noise" in bound_estimator(model).described
    with pytest.raises(DlmBridgeError, match=r"^tasks: .*hybrid noise"):
        is_greedy(model, Answer((9,), (8,)))
    with pytest.raises(DlmBridgeError, match=r"^objective: .*hybrid"):
        DiffusionCollator.of(model)
    trained = {"model": str(folder), "from_scratch": False, "steps": 1}
    run(tmp_path / "continued", **trained)
    assert "objective: uniform_hybrid" in (tmp_path / "continued/config.yaml").read_text()
    with pytest.raises(DlmBridgeError, match=r"^objective: masked"):
        run(tmp_path / "adapter", **trained, objective="masked", lora_rank=2)
    run(tmp_path / "masked", **trained, objective="masked")
    config = json.loads((tmp_path / "masked/checkpoints/step-0000001/config.json").read_text())
    assert config["noise_process"] == "mask"


@pytest.mark.parametrize("objective", ["uniform", pytest.param("uniform_hybrid", marks=pytest.mark.slow)])
def test_what_is_trained_is_sampled(objective: str, tmp_path: Path, run: Run, tokenizer: Any) -> None:
    """Text that goes round in a cycle: sampled from noise, each token follows the one before it."""
    (tmp_path / "text.txt").write_text("abcdefgh" * 3000)
    options = {"data": [str(tmp_path / "text.txt")], "steps": 200, "global_batch_size": 32, "length_variation": 0.0}
    run(tmp_path / "run", objective=objective, eval_interval=0, save_interval=0, **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-0000200")
    cycle = tokenizer("abcdefgh").input_ids
    follows = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    prompts = torch.tensor([[token, follows[token]] for token in cycle])
    text = model.generate(prompts, gen_length=14, steps=28, seed=0, eos_token_id=None)
    pairs = [pair for row in text.tolist() for pair in pairwise(row)]
    assert sum(follows.get(one) == other for one, other in pairs) > 0.6 * len(pairs)  # by chance among six: 0.17
