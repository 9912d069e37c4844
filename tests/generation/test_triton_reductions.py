"""The kernels over the vocabulary against PyTorch's argmax and softmax: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu(optional=True)

from dlm_bridge.generation.runtime import triton_kernels  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [7, 8192, 20001])
def test_reductions(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (5 * torch.randn(3, 5, vocabulary, generator=generator)).to(DEVICE, dtype)[:, 1:]  # a view
    logits[0, 0, vocabulary // 2 :] = -torch.inf
    logits[1, :, 3], logits[1, :, 5] = 1000, 1000  # the first of equal ones
    logits[2, :, 4] = 30
    for without in (4, vocabulary - 1):
        others = logits.clone()
        others[..., without] = -torch.inf
        tokens = triton_kernels.best_token(logits, without)
        assert torch.equal(tokens, others.argmax(dim=-1))
        assert (tokens != without).all()
        assert (tokens[1] == 3).all()
        expected = logits.double().softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]
        for wanted, error in ((dtype, 2 * torch.finfo(dtype).eps), (torch.float64, 1e-13)):
            found = triton_kernels.probability_of(tokens, logits, wanted)
            assert found.dtype == wanted
            torch.testing.assert_close(found.double(), expected, rtol=error, atol=1e-7 if wanted == dtype else 0)


def test_nothing_to_reduce() -> None:
    logits = torch.zeros(2, 0, 9, device=DEVICE)
    assert triton_kernels.best_token(logits, 8).shape == (2, 0)
