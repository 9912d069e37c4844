"""Temperature, seeds and generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation import generate
from dlm_bridge.generation.token_sampling import TokenSampling
from tests.generation.conftest import prompts
from tests.generation.scripted import Scripted

ARGUMENTS = {"gen_length": 16, "block_length": 8, "eos_token_id": None, "temperature": 1.0}


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_tokens_are_drawn_from_the_tempered_softmax(temperature: float) -> None:
    logits = torch.tensor([0.3, 1.2, -0.5, 0.9, 5.0])  # the last one is the mask token
    model = Scripted(logits.expand(4, 5))
    output = generate(
        model,
        torch.zeros(5000, 0, dtype=torch.long),
        gen_length=4,
        steps=2,
        remasking="random",  # choosing by confidence favours likely draws, as it should
        eos_token_id=None,
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
    )
    counts = torch.bincount(output.flatten(), minlength=5).double()
    assert counts[4] == 0
    expected = 20000 * (logits[:4].double() / temperature).softmax(0)
    # Chi-square with 3 degrees of freedom: above 21.1 once in ten thousand.
    assert float(((counts[:4] - expected) ** 2 / expected).sum()) < 21.1


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 1e-300])
def test_a_temperature_next_to_nothing_is_greedy(model: Any, temperature: float) -> None:
    """Where logits / temperature are beyond float32's largest number, too."""
    given = {"gen_length": 16, "block_length": 8, "eos_token_id": None}
    almost = model.generate(prompts(2, 5), temperature=temperature, threshold=0.5, seed=0, **given)
    assert torch.equal(almost, model.generate(prompts(2, 5), threshold=0.5, **given))
    logits = 100 * torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(TokenSampling(temperature).shape(logits).softmax(dim=-1).argmax(dim=-1), logits.argmax(dim=-1))


def test_a_draw_of_zero_never_wins() -> None:
    uniform = torch.tensor([[[0.0, 0.5, 0.5]]], dtype=torch.float64)  # -log(-log 0) is minus infinity
    logits = torch.tensor([[[800.0, 1.0, 0.0]]])
    assert TokenSampling(1.0).propose(logits, logits, 2, uniform).tolist() == [[1]]


def test_the_model_s_logits_are_not_changed() -> None:
    model = Scripted(torch.zeros(4, 4, dtype=torch.float64))
    for temperature in (0.0, 1.0):
        generate(model, torch.zeros(1, 0, dtype=torch.long), gen_length=4, temperature=temperature, eos_token_id=None)
    assert not model.table.any()


def test_a_seed_gives_a_row_the_same_noise_alone_and_in_any_batch(model: Any) -> None:
    ids = prompts(4, 6)
    together = model.generate(ids, seed=7, **ARGUMENTS)
    for row in range(4):
        assert torch.equal(model.generate(ids[row : row + 1], seed=7, **ARGUMENTS)[0], together[row])
    assert torch.equal(model.generate(ids.flip(0), seed=7, **ARGUMENTS), together.flip(0))
    assert not torch.equal(model.generate(ids, seed=8, **ARGUMENTS), together)


def test_copies_of_a_prompt_draw_different_noise(model: Any) -> None:
    output = model.generate(prompts(1, 6).repeat(4, 1), seed=7, **ARGUMENTS)
    assert len({tuple(row) for row in output.tolist()}) == 4


def test_a_generator_comes_before_a_seed_that_is_stored(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompts(1, 6)
    drawn = model.generate(ids, generator=torch.Generator().manual_seed(1), **ARGUMENTS)
    monkeypatch.setattr(model.generation_config, "seed", 7)
    assert torch.equal(model.generate(ids, **ARGUMENTS), model.generate(ids, seed=7, **ARGUMENTS))
    assert torch.equal(model.generate(ids, generator=torch.Generator().manual_seed(1), **ARGUMENTS), drawn)


def test_different_prompts_draw_different_noise() -> None:
    model = Scripted(torch.zeros(20, 9))
    output = generate(model, torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]]), seed=7, **ARGUMENTS)
    assert isinstance(output, torch.Tensor)
    assert not torch.equal(output[0, 4:], output[1, 4:])


def test_generators_per_row_follow_their_row(model: Any) -> None:
    ids = prompts(3, 6)

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]

    together = model.generate(ids, generator=generators(), **ARGUMENTS)
    assert torch.equal(model.generate(ids[1:2], generator=generators()[1:2], **ARGUMENTS)[0], together[1])
    # ... also when other rows have ended and left the batch
    end = int(together[0, 6])
    stopped = model.generate(ids, generator=generators(), **ARGUMENTS | {"eos_token_id": end, "pad_token_id": 99})
    first = next((i for i in range(6, 22) if together[1, i] == end), 21)
    assert torch.equal(stopped[1, : first + 1], together[1, : first + 1])


def test_one_generator_or_the_global_state(model: Any) -> None:
    ids = prompts(2, 6)
    first = model.generate(ids, generator=torch.Generator().manual_seed(1), **ARGUMENTS)
    state = torch.get_rng_state()
    assert torch.equal(model.generate(ids, generator=torch.Generator().manual_seed(1), **ARGUMENTS), first)
    model.generate(ids, seed=1, **ARGUMENTS)
    assert torch.equal(torch.get_rng_state(), state)  # untouched by both
    torch.manual_seed(1)
    assert torch.equal(model.generate(ids, **ARGUMENTS), first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 1, "generator": torch.Generator()}, "give one of them"),
        ({"generator": [torch.Generator()]}, "1 generators for 2 rows"),
        ({"generator": [torch.Generator()] * 0}, "must be a torch.Generator or a list"),
        ({"generator": 5}, "must be a torch.Generator or a list"),
        ({"generator": [torch.default_generator] * 2}, "same torch.Generator twice"),
    ],
)
def test_bad_generators(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DlmBridgeError, match=message):
        model.generate(prompts(2, 4), gen_length=8, **arguments)
