"""The kernels over the vocabulary, and of random numbers, against PyTorch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu(optional=True)

from dlm_bridge.generation.token_sampling import invert, without_token  # noqa: E402
from dlm_bridge.kernels import sampling  # noqa: E402
from dlm_bridge.objectives.noise import philox_uniform  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [7, 8192, 20001])
@pytest.mark.fast("*float32", "7-*")
def test_reductions(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (5 * torch.randn(3, 5, vocabulary, generator=generator)).to(DEVICE, dtype)[:, 1:]  # a view
    logits[0, 0, vocabulary // 2 :] = -torch.inf
    logits[1, :, 3], logits[1, :, 5] = 1000, 1000  # the first of equal ones
    logits[2, :, 4] = 30
    for without in (4, vocabulary - 1):
        others = logits.clone()
        others[..., without] = -torch.inf
        tokens = sampling.best_token(logits, without)
        assert torch.equal(tokens, others.argmax(dim=-1))
        assert (tokens != without).all()
        assert (tokens[1] == 3).all()
        expected = logits.double().softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]
        for wanted, error in ((dtype, 2 * torch.finfo(dtype).eps), (torch.float64, 1e-13)):
            found = sampling.probability_of(tokens, logits, wanted)
            assert found.dtype == wanted
            torch.testing.assert_close(found.double(), expected, rtol=error, atol=1e-7 if wanted == dtype else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [7, 8192, 20001])
@pytest.mark.fast("*float32", "7-*")
def test_draws(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(4, 6, vocabulary, generator=generator)).to(DEVICE, dtype)[:, 1:]  # a view
    logits[0, :, vocabulary // 2 :] = -torch.inf
    logits[1, :, 4] = 1000  # the token that is left out
    uniform = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    uniform[:, 3:] = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    uniform = uniform.to(DEVICE)
    found = sampling.draw_token(logits, 4, uniform)
    weights = without_token(logits, 4, torch.float64).softmax(dim=-1)
    assert (weights.gather(-1, found[..., None]) > 0).all()
    # The sum up to a token encloses the number; exponentials are float32.
    after = weights.cumsum(dim=-1).gather(-1, found[..., None])[..., 0]
    before = after - weights.gather(-1, found[..., None])[..., 0]
    assert ((before < uniform + 1e-6) & (uniform - 1e-6 < after)).all()
    assert (found == invert(weights, uniform)).double().mean() > 0.9


def test_random_numbers_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    seed, draw = (torch.randint(-(2**63), 2**63 - 1, (5, 1), generator=generator) for _ in range(2))
    places = torch.arange(-7, 2**33, 2**25).expand(5, -1)
    found = sampling.philox_uniform(seed.to(DEVICE), draw.to(DEVICE), places.to(DEVICE))
    assert torch.equal(found.cpu(), philox_uniform(seed, draw, places))


def test_nothing_to_reduce() -> None:
    logits, uniform = torch.zeros(2, 0, 9, device=DEVICE), torch.zeros(2, 0, dtype=torch.float64, device=DEVICE)
    assert sampling.best_token(logits, 8).shape == (2, 0)
    assert sampling.draw_token(logits, 8, uniform).shape == (2, 0)
    assert sampling.philox_uniform(*[torch.zeros(2, 0, dtype=torch.long, device=DEVICE)] * 3).shape == (2, 0)
