"""Every family's tiny checkpoint samples by its own published algorithm, on its own attention."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_bridge.generation import SAMPLERS, DiffusionGenerationConfig
from dlm_bridge.generation.samplers import SpecialTokens
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.models.families import FamilySpec, families
from tests.families.case import VARIANTS, FamilyCase, all_cases
from tests.generation import published
from tests.generation import published_samplers as samplers

CARDS = Path(__file__).parents[2] / "model_cards"
DIFFUSION = [case for case in all_cases() if case.spec.kind == "diffusion"]
GEN = 8


def expected(model: Any, algorithm: str, row: list[int], mask: int) -> list[int]:
    bidirectional = samplers.bidirectional(model)
    block = getattr(model.config, "block_size", 4)
    if algorithm in ("llada", "difflm", "illada", "mdlm"):
        return published.sample(
            model, torch.tensor([row]), mask=mask, steps=GEN, gen_length=GEN, block_length=GEN
        )[0].tolist()  # fmt: skip
    if algorithm == "dream":
        return samplers.dream(bidirectional, row, GEN, mask, steps=GEN, alg="entropy")
    if algorithm == "dreamon":
        tokens = {"expand": model.config.expand_token_id, "delete": model.config.eos_token_id}
        return samplers.dreamon(bidirectional, row + [mask] * 4, GEN, mask, alg="entropy", **tokens)[0]
    if algorithm == "diffullama":  # in one step everything is revealed
        return row + bidirectional(row + [mask] * GEN)[len(row) :].argmax(-1).tolist()
    if algorithm == "rnd1":
        return samplers.rnd1(bidirectional, row, GEN, mask, steps=5, temperature=1.0, pad=0)
    if algorithm == "nemotron":
        return samplers.nemotron(model, row, GEN, mask, block=GEN, threshold=0.9)
    if algorithm == "idlm":
        return samplers.idlm(model, row, GEN, mask, count=3)[0]
    if algorithm == "wedlm":
        return samplers.wedlm(model, row, GEN, mask, window=16, threshold=0.4, factor=0.02)
    logits = samplers.block_causal(model, block)
    if algorithm == "fast_dllm_v2":
        small = min(block, 8)
        return samplers.fast_dllm_v2(logits, row, GEN, mask, block=block, small=small, threshold=0.9)
    if algorithm == "llada2.2":
        arguments = {"steps": 32, "threshold": 0.5, "editing": 0.0, "post": 16, "most": 1000}
        return samplers.llada22(logits, row, GEN, mask, block=block, delete=101, split=102, **arguments)
    steps = min(block, GEN) if algorithm == "llada2" else block  # LLaDA2 takes no more steps than new tokens
    bounds = {"steps": steps, "strategy": "low_confidence_dynamic", "threshold": 0.9}
    return samplers.sdar(logits, row, GEN, mask, block=block, **bounds)


OVERRIDES: dict[str, dict[str, Any]] = {
    "llada": {"block_length": GEN},
    "illada": {"block_length": GEN},
    "mdlm": {"steps": GEN},
    "dream": {"alg": "entropy", "steps": GEN},
    "diffullama": {"steps": 1, "top_p": None},
    "rnd1": {"steps": 5, "temperature": 1.0, "greedy": True, "eos_token_id": 1, "pad_token_id": 0},
    "nemotron": {"block_length": GEN},
    "sdar": {"threshold": 0.9},
    "llada2": {"threshold": 0.9},
}


@pytest.mark.parametrize("case", DIFFUSION, ids=lambda case: case.id)
@pytest.mark.fast(but=VARIANTS)
def test_a_family_samples_by_its_own_algorithm(case: FamilyCase, tmp_path: Path) -> None:
    # In float64 a batch and a row alone do not round to different tokens.
    model = case.load(case.write(tmp_path / "hub"), dtype=torch.float64)
    model.set_experts_implementation("eager")  # torch._grouped_mm has no float64
    mask = model.config.vocab_size - 1
    head = model.get_output_embeddings().weight
    with torch.no_grad():  # peaked, or no threshold is ever met; and never for the mask token or the end
        head.mul_(10)
        head[[mask, 1]] = 0
    algorithm = model.sampler_defaults["algorithm"]
    arguments: dict[str, Any] = {"gen_length": GEN, "temperature": 0.0, "mask_token_id": mask, "eos_token_id": None}
    arguments |= OVERRIDES.get(algorithm, {})
    if algorithm == "fast_dllm_v2":
        arguments["small_block_size"] = min(model.config.block_size, 8)
    if algorithm == "llada2":
        arguments["steps"] = model.config.block_size
    model.requires_grad_(False)
    rows = [[2, 3, 5, 7, 11], [13, 17, 19]]
    ids = torch.tensor([rows[0], [0, 0, *rows[1]]])
    real = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    output = model.generate(ids, attention_mask=real, return_dict_in_generate=True, **arguments)
    lines = [line[:end] for line, end in zip(output.sequences.tolist(), output.row_ends.tolist(), strict=True)]
    assert lines[0] == expected(model, algorithm, rows[0], mask)
    assert lines[1][2:] == expected(model, algorithm, rows[1], mask)


@pytest.mark.parametrize("case", DIFFUSION, ids=lambda case: case.id)
def test_defaults_are_complete(case: FamilyCase, tmp_path: Path) -> None:
    """Nothing but a prompt and a length is needed; what the family says is among its sampler's parameters."""
    model = case.load(case.write(tmp_path / "hub"))
    settings = resolve_settings(model, None, {"mask_token_id": 99}, prompt_width=4)
    assert settings.sampler.name == model.sampler_defaults["algorithm"]
    assert {*model.sampler_defaults} <= {"algorithm", *settings.sampler.parameters()}
    if settings.sampler.model_blocks:
        assert settings.sampler.block_length == model.config.block_size


def test_every_diffusion_family_names_its_sampler() -> None:
    for spec in families():
        if spec.kind == "diffusion" and not spec.native:
            assert spec.sampler["algorithm"] in SAMPLERS


@pytest.mark.extension("extra_samplers")
@pytest.mark.parametrize(
    "card",
    sorted(card for card in CARDS.glob("*.md") if "model.generate(" in card.read_text()),
    ids=lambda card: card.stem,
)
def test_the_card_s_example_is_a_call_that_works(card: Path, tmp_path: Path) -> None:
    """Of its keywords; the prompts are ours."""
    blocks = re.findall(r"```python\n(.*?)```", card.read_text(), flags=re.DOTALL)
    calls = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "generate"]
    assert calls
    case = next(case for case in DIFFUSION if case.name.startswith(card.stem))
    model = case.load(case.write(tmp_path / "hub"))
    for call in calls:
        given = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg is not None}
        settings = resolve_settings(model, None, {"mask_token_id": 99, **given}, prompt_width=4)
        settings.sampler.spec(SpecialTokens(0, ()))


IN_BLOCKS = [
    spec
    for spec in families()
    if spec.sampled_here and (spec.attention_pattern == "block_causal" or spec.name == "nemotron_labs_diffusion")
]


@pytest.mark.parametrize("spec", IN_BLOCKS, ids=lambda spec: spec.name)
def test_blocks_that_a_model_was_not_trained_with_are_a_warning(
    spec: FamilySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("dlm_bridge.generation.settings.logger.warning_once", said.append)
    model = SimpleNamespace(config=spec.load("config_class")(block_size=16, mask_token_id=3), family=spec)

    def resolved(**keywords: Any) -> Any:
        kind = resolve_settings(model, None, keywords, prompt_width=4).sampler
        return kind.block_length

    assert resolved() == resolved(block_length=16) == 16
    assert not said
    assert resolved(block_length=8) == 8
    (line,) = said
    assert "block_length 8" in line
    assert line.count("16") == 1
    model.generation_config = DiffusionGenerationConfig(block_length=32, gen_length=64)
    assert resolved() == 32
    assert "block_length 32" in said[1]
