"""What convert-to-dlm makes of autoregressive models trains in the Megatron engine as in the Accelerate engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.convert.to_dlm import convert_to_dlm
from dlm_bridge.models.families import FamilySpec, families
from tests.autoregressive.cases import CASES
from tests.data.chats import chatty, conversation, three_steps, write_rows
from tests.train.conftest import VOCAB, Run

pytest.importorskip("megatron.core")
BODIES = {case.family: case for case in reversed(CASES)}
FORMS = [spec for spec in families() if spec.derived_from and "megatron" in spec.training]
# One form of a body with latent attention, and one with experts; make test-slow has the others.
SHOWN = ("deepseek_v3_bidirectional", "glm4_moe_block_causal")


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, id=form.name, marks=[pytest.mark.slow] * (form.name not in SHOWN)) for form in FORMS],
)
@pytest.mark.fast("glm4_moe_block_causal")
def test_both_engines_train_alike(
    form: FamilySpec, tmp_path: Path, run: Run, on_megatron: Run, tokenizer: Any
) -> None:
    changed: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 256}
    if "sliding_window" in BODIES[form.derived_from].config:
        changed["sliding_window"] = None  # as in Mistral 0.3 and Phi-4; megatron-core has causal windows only
    BODIES[form.derived_from].write(tmp_path / "ar", **changed)
    chatty(tokenizer).save_pretrained(tmp_path / "ar")
    convert_to_dlm(tmp_path / "ar", tmp_path / "dlm", to=form.name)
    rows = write_rows(tmp_path / "chats.jsonl", [conversation(number) for number in range(24)])
    options = three_steps(tmp_path / "dlm", rows)
    ours, theirs = on_megatron(tmp_path / "megatron", **options), run(tmp_path / "accelerate", **options)
    assert len(ours) == 3
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=1e-4), key
