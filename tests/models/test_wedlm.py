"""WeDLM's attention goes by the order of the input, its rotary embedding by `position_ids`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.families.wedlm import CASES
from tests.reference import decoder_logits


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_reordered_input_is_one_causal_sequence(tmp_path: Path, case, attention: str) -> None:  # type: ignore[no-untyped-def]
    """Known tokens first and masks last, each with the position that it has in the text. Positions that jump must not
    be taken for the borders of packed sequences."""
    tensors = case.tensors(case.config, 0, torch.float32)
    model = case.load(case.write(tmp_path / "hub"), attn_implementation=attention)
    text = torch.randint(0, 99, (2, 24), generator=torch.Generator().manual_seed(0))
    masked = torch.rand(text.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    order = masked.long().argsort(dim=1, stable=True)
    ids = torch.where(masked, 99, text).gather(1, order)
    earlier = torch.ones(24, 24, dtype=torch.bool).tril().expand(2, -1, -1)
    expected = decoder_logits(tensors, case.config, ids, earlier, order)
    with torch.no_grad():
        for mask in (None, torch.ones_like(ids), earlier[:, None]):
            logits = model(ids, attention_mask=mask, position_ids=order).logits
            torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)
