"""Temperature, seeds and generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.generation import generate
from dlm_bridge.generation.token_sampling import Noise, TokenSampling, invert
from dlm_bridge.objectives.noise import philox_words
from tests.generation.conftest import prompts
from tests.generation.scripted import Scripted
from tests.refusals import refused

ARGUMENTS = {"gen_length": 16, "block_length": 8, "eos_token_id": None, "temperature": 1.0}


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
@pytest.mark.fast("0.4")
def test_tokens_are_drawn_from_the_tempered_softmax(temperature: float) -> None:
    logits = torch.tensor([0.3, 1.2, -0.5, 0.9, 5.0])  # the last one is the mask token
    model = Scripted(logits.expand(4, 5))
    output = generate(
        model,
        torch.zeros(2000, 0, dtype=torch.long),
        gen_length=4,
        steps=2,
        remasking="random",  # choosing by confidence favours likely draws, as it should
        eos_token_id=None,
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
    )
    counts = torch.bincount(output.flatten(), minlength=5).double()
    assert counts[4] == 0
    expected = 8000 * (logits[:4].double() / temperature).softmax(0)
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


def test_philox_is_the_published_function() -> None:
    """The known answers of Random123 (kat_vectors, philox4x32 10)."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    answers = {
        (0,) * 6: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (2**32 - 1,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        pi: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    }
    inputs = torch.tensor(list(answers)).T
    assert torch.stack(philox_words(*inputs)).T.tolist() == [list(words) for words in answers.values()]


def test_uniform_numbers_of_neighbouring_keys() -> None:
    """Rows of seeds 0 to 31, 32 draws of 64 places each: uniform, and independent along every axis."""
    noise = Noise(range(32), torch.device("cpu"))
    places = torch.arange(64).expand(32, -1)
    numbers = torch.stack([noise.uniform(range(32), places) for _ in range(32)])
    assert numbers.dtype == torch.float64
    assert ((numbers > 0) & (numbers < 1)).all()
    expected = numbers.numel() / 256
    counts = torch.histc(numbers.float().flatten(), 256, 0, 1).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 347  # 255 degrees of freedom: once in ten thousand
    centred = (numbers - 0.5) * 12**0.5
    for axis in range(3):
        for distance in (1, 2, 16):
            length = centred.shape[axis] - distance
            products = centred.narrow(axis, 0, length) * centred.narrow(axis, distance, length)
            assert abs(float(products.mean())) < 4 / products.numel() ** 0.5
    assert len({*numbers.flatten().tolist()}) == numbers.numel()


def test_a_row_s_numbers_are_its_own() -> None:
    """Whatever other rows draw, enter and leave, and whichever places are asked for."""
    cpu, places = torch.device("cpu"), torch.arange(-3, 9)[None]
    alone = Noise([7], cpu)
    expected = [alone.uniform([0], places)[0] for _ in range(4)]
    noise = Noise([5, 7, -1], cpu)
    assert torch.equal(noise.uniform(range(3), places.expand(3, -1))[1], expected[0])
    noise.uniform([0, 2], places.expand(2, -1))
    assert torch.equal(noise.uniform([2, 1], places[:, 4:7].expand(2, -1))[1], expected[1][4:7])
    noise.select_rows([1, 2])
    noise.admit([9, 2**62])
    others = torch.tensor([[30], [31]]) + places
    assert torch.equal(noise.uniform([2, 3], torch.cat([places, others[:1]]))[0], expected[2])
    assert torch.equal(noise.uniform(range(4), places.expand(4, -1))[2], expected[3])
    assert len({*torch.stack(expected).flatten().tolist()}) == 4 * 12


def test_a_token_without_probability_is_never_drawn() -> None:
    extremes = torch.tensor([[2.0**-53, 0.5, 1 - 2.0**-53]], dtype=torch.float64)
    logits = torch.tensor([-torch.inf, 800.0, 1.0, 0.0, -torch.inf, 900.0]).expand(1, 3, -1)
    assert TokenSampling(1.0).propose(logits, logits, 5, extremes).tolist() == [[1, 1, 1]]
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0], dtype=torch.float64).expand(1, 3, -1)
    assert invert(weights, extremes).tolist() == [[1, 3, 3]]


def test_rare_tokens_are_drawn_as_often_as_they_should_be() -> None:
    """100,000 tokens that share 1e-4 of the probability, each below what a sum in float32 resolves."""
    weights = torch.full((100_001,), 1e-9, dtype=torch.float64)
    weights[0] = 1 - 1e-4
    rare = torch.arange(0, 100_000, 7777)
    middles = 1 - 1e-4 + 1e-9 * (rare.double() + 0.5)
    drawn = invert(weights.expand(1, len(rare), -1), middles[None])
    assert (drawn[0] - 1 - rare).abs().max() <= 1


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


def test_rows_have_seeds_of_their_own(model: Any) -> None:
    ids = prompts(3, 6)
    together = model.generate(ids, seed=[4, 9, 4], **ARGUMENTS)
    assert torch.equal(model.generate(ids[1:2], seed=[9], **ARGUMENTS)[0], together[1])
    with refused(SettingError, "seed", "2", "3"):
        model.generate(ids, seed=[4, 9], **ARGUMENTS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"seed": [1, "2"]}, "'2'"),
        ({"seed": 1, "generator": torch.Generator()}, "`generator`"),
        ({"generator": [torch.Generator()]}, "1 generator for 2 rows"),
        ({"generator": []}, "torch.Generator"),
        ({"generator": 5}, "torch.Generator"),
        ({"generator": [torch.default_generator] * 2}, "twice"),
    ],
)
def test_bad_generators(model: Any, arguments: dict[str, Any], named: str) -> None:
    with refused(SettingError, next(iter(arguments)), named):
        model.generate(prompts(2, 4), gen_length=8, **arguments)
