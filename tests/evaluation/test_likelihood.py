"""Likelihood bounds of every family: against single passes over the canvas, and against all subsets of masks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dlm_bridge.evaluation import likelihood as module
from dlm_bridge.evaluation.likelihood import Answer, MaskSample, bound_estimator, is_greedy, likelihood_bounds
from dlm_bridge.models.families import family_by_name
from tests.families.case import FamilyCase, all_cases, few

CASES = {case.name: case for case in all_cases() if not case.label}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> FamilyCase:
    return request.param


@pytest.fixture(scope="module")
def model(case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = case.load(case.write(tmp_path_factory.mktemp("bounds") / case.id))
    model.config.mask_token_id = 99
    if bound_estimator(model).block is not None:
        model.config.block_size = 4
    return model


def _answer(model: Any, count: int = 3) -> Answer:
    """Over a block's boundary, where there are blocks."""
    block = bound_estimator(model).block
    tokens = torch.randint(1, 90, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    start = 4 if block is None else max(block - 1, 1)
    return Answer(tuple(tokens[:start]), tuple(tokens[start : start + count]))


@torch.no_grad()
def _one_pass_each(model: Any, answer: Answer, masked: np.ndarray[Any, Any]) -> dict[int, float]:
    """log p of each masked token: a canvas for the whole, or for each block behind the clean ones before it."""
    family, read = model.family, bound_estimator(model)
    clean, start = [*answer.prompt, *answer.answer], len(answer.prompt)
    ids = list(clean)
    for place in np.flatnonzero(masked):
        ids[start + place] = read.objective.mask_token_id
    block = read.block or len(ids)
    found = {}
    for first in range(0, len(ids), block):
        inside = list(range(first, min(first + block, len(ids))))
        places = [place for place in inside if place >= start and masked[place - start]]
        if not places:
            continue
        canvas = clean[:first] + [ids[place] for place in inside]
        arguments: dict[str, Any] = {}
        where = {place: place for place in places}
        if family.objective == "wedlm":  # masks stand last, with their positions
            order = sorted(inside, key=lambda place: place in places)
            canvas = clean[:first] + [ids[place] for place in order]
            arguments["position_ids"] = torch.tensor([[*range(first), *order]])
            where = {place: first + order.index(place) for place in places}
        if family.objective == "nemotron":  # tokens before the block look back only
            allowed = torch.ones(len(canvas), len(canvas), dtype=torch.bool).tril()
            allowed[first:] = True
            arguments["attention_mask"] = allowed[None, None]
        logits = model(torch.tensor([canvas]), **arguments).logits[0].log_softmax(-1)
        for place in places:
            found[place - start] = logits[where[place] - family.shift, clean[place]].item()
    return found


def _subsets(count: int) -> Iterator[np.ndarray[Any, Any]]:
    for chosen in itertools.product([False, True], repeat=count):
        if any(chosen):
            yield np.array(chosen)


@pytest.mark.fast(*few())
def test_every_subset_is_read_as_a_sampler_would(model: Any) -> None:
    """Alone and in a padded batch; weights are told apart by giving each token another."""
    answer, short = _answer(model), Answer((5, 6), (7,))
    weights = np.array([1.0, 10.0, 100.0])
    for masked in _subsets(3):
        expected = sum(weights[place] * logp for place, logp in _one_pass_each(model, answer, masked).items())
        draws = [MaskSample(np.array([True]), np.array([1.0])), MaskSample(masked, weights)]
        _, found = module._sample_bounds(model, bound_estimator(model), [short, answer], draws)
        assert found == pytest.approx(expected, rel=1e-4)
        assert module._sample_bounds(model, bound_estimator(model), [answer], draws[1:]) == pytest.approx(
            [expected], rel=1e-4
        )


def test_one_token_is_exact(model: Any) -> None:
    answer = Answer(_answer(model).prompt, _answer(model).answer[:1])
    (found,) = likelihood_bounds(model, [answer], samples=2)
    assert found.value == pytest.approx(_one_pass_each(model, answer, np.array([True]))[0], rel=1e-4)
    assert found.error < 1e-5


@pytest.mark.parametrize("case", [CASES[name] for name in ("llada", "dream", "sdar", "wedlm")], indirect=True)
def test_mean_of_the_samples_is_the_expectation(case: FamilyCase, model: Any) -> None:
    """Over all numbers of masks and all subsets, group by group; and neither order nor batch changes a sample."""
    answer = _answer(model, 4)
    groups = module._block_ids(bound_estimator(model), answer)
    expected = 0.0
    for group in set(groups.tolist()):
        members = np.flatnonzero(groups == group)
        for size in range(1, len(members) + 1):
            share = 1 / len(members) / math.comb(len(members), size)
            for chosen in itertools.combinations(members, size):
                masked = np.isin(np.arange(4), chosen)
                logps = _one_pass_each(model, answer, masked)
                expected += share * len(members) / size * sum(logps.values())
    (found,) = likelihood_bounds(model, [answer], samples=256, batch_size=64)
    assert 0 < found.error < 0.2
    assert abs(found.value - expected) < 4 * found.error
    other = Answer((5, 6), (7, 8))
    together = likelihood_bounds(model, [other, answer], samples=256, batch_size=50)
    assert together[1].value == pytest.approx(found.value, rel=1e-5)
    assert likelihood_bounds(model, [answer], samples=8, seed=1)[0] != likelihood_bounds(model, [answer], samples=8)[0]


def test_samples_spread_over_all_numbers_of_masks(model: Any) -> None:
    read = bound_estimator(model)
    answer = Answer((1,) * (read.block or 1), tuple(range(2, 10)) if (read.block or 8) >= 8 else (2, 3, 4, 5))
    groups = module._block_ids(read, answer)
    draws = [module._sample_mask(read, answer, 0, sample, 16) for sample in range(16)]
    for group in set(groups.tolist()):
        size = int((groups == group).sum())
        counts = [int(draw.masked[groups == group].sum()) for draw in draws]
        assert sorted(set(counts)) == list(range(1, size + 1))
        for draw, count in zip(draws, counts, strict=True):
            assert draw.weights[groups == group] == pytest.approx(size / count)


@pytest.mark.parametrize("case", [CASES[name] for name in ("llada", "dream", "sdar")], indirect=True)
def test_greedy_answers_are_recognised(case: FamilyCase, model: Any) -> None:
    """The answer that commits the surest token, pass by pass, written here; and that with another last token."""
    start = _answer(model)
    mask, written, left = bound_estimator(model).objective.mask_token_id, [0, 0, 0], {0, 1, 2}
    blocks = module._block_ids(bound_estimator(model), start)
    while left:
        ids = [*start.prompt, *(mask if place in left else written[place] for place in range(3))]
        first = min(blocks[place] for place in left)
        now = [place for place in left if blocks[place] == first]
        if (block := bound_estimator(model).block) is not None:
            ids = ids[: (len(start.prompt) // block + first + 1) * block]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        logits[:, mask] = -torch.inf
        best = {p: logits[len(start.prompt) + p - model.family.shift].log_softmax(-1).max(dim=-1) for p in now}
        surest = max(now, key=lambda place: float(best[place].values))
        written[surest] = int(best[surest].indices)
        left.remove(surest)
    assert is_greedy(model, Answer(start.prompt, tuple(written)))
    written[2] = (written[2] + 1) % 90
    assert not is_greedy(model, Answer(start.prompt, tuple(written)))


@pytest.mark.parametrize("noise", [{"noise_process": "uniform"}, {"noise_process": "hybrid", "p_uniform": 0.3}])
def test_the_bound_of_random_tokens_is_tight_for_the_best_model(noise: dict[str, Any]) -> None:
    """A model that predicts independent tokens by their frequencies: bounds of each token's rows, weighted by the
    frequencies, are the entropy."""
    mask, logits = 2, torch.tensor([0.3, 1.2, 9.0, -0.5, 0.9])
    data = logits.index_fill(0, torch.tensor(mask), -torch.inf).softmax(0)

    class Constant(torch.nn.Module):
        family = family_by_name("llada")
        config = SimpleNamespace(vocab_size=5, mask_token_id=mask, **noise)

        def get_input_embeddings(self) -> Any:
            return SimpleNamespace(weight=torch.zeros(5, 1))

        def forward(self, logits_to_keep: torch.Tensor, input_ids: torch.Tensor, **_: Any) -> Any:
            assert (input_ids[:, 0] == 3).all()  # the prompt is never noise
            return SimpleNamespace(logits=logits.expand(int(logits_to_keep.sum()), -1))

    tokens = [0, 1, 3, 4]
    bounds = likelihood_bounds(Constant(), [Answer((3,), (token,) * 64) for token in tokens], 512, batch_size=512)
    found = -sum(data[token].item() * bound.value / 64 for token, bound in zip(tokens, bounds, strict=True))
    entropy = -float(torch.xlogy(data, data).sum())
    assert found == pytest.approx(entropy, rel=0.04)
