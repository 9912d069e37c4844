"""Samplers against what their public code gave, on the same model: recorded tokens and numbers of forward passes.

Each record of recorded_samplers.json names the repository, commit and file whose functions ran, greedily and row by
row, in float64, on the stand-in model of its seed or, for caches, on the tiny Dream of the families' tests. Here the
rows run in one ragged batch, and each alone.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.errors import RowError, SettingError
from dlm_bridge.generation import generate
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import Ended, Request
from tests.families.dream import CASE as DREAM
from tests.generation.conftest import prompts
from tests.generation.standin import MASK, StandIn, family, ragged
from tests.generation.test_caches import SDAR, load_case
from tests.refusals import refused

RECORDS = json.loads((Path(__file__).parent / "recorded_samplers.json").read_text())


class NeverMask(StandIn):
    """Gives the mask token no probability."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits[..., MASK] = -1e4
        return output


def name_of(record: dict[str, Any]) -> str:
    return "-".join(str(value) for value in record["settings"].values())


@pytest.mark.parametrize("record", [record for record in RECORDS if "seed" in record], ids=name_of)
def test_the_public_code_s_tokens(record: dict[str, Any]) -> None:
    settings = {"eos_token_id": None, **record["settings"]}
    facts = family(record.get("pattern", "bidirectional"), shift=record["shift"], algorithm=settings["algorithm"])
    block = record.get("block_size", 1)
    model = NeverMask(facts, seed=record["seed"], peak=3.0, block_size=block)
    rows, ids, mask = ragged((5, 9, 1, 8), record["seed"])
    together = generate(model, ids, attention_mask=mask, **settings)
    assert together[:, 9:].tolist() == record["tokens"]
    for row, tokens, forwards in zip(rows, record["tokens"], record["forwards"], strict=True):
        alone = generate(model, torch.tensor([row]), return_dict_in_generate=True, **settings)
        assert alone.sequences[0, len(row) :].tolist() == tokens
        # What the code commits behind the last new token, to complete a block, takes no forward pass here.
        whole = (len(row) + len(tokens)) % block == 0
        assert alone.forwards == forwards if whole else alone.forwards <= forwards


@pytest.mark.parametrize("algorithm", ["hierarchical", "credit"])
def test_blocks_are_the_block_causal_model_s(algorithm: str, tmp_path: Path) -> None:
    """Few new tokens do not shorten a block, and committed blocks may be cached: it changes no token."""
    model, mask = load_case(SDAR, tmp_path)
    settings = {"algorithm": algorithm, "threshold": 0.5, "mask_token_id": mask, "eos_token_id": None}
    settings |= {"temperature": 0.0, "pad_token_id": 0}
    ids, real = prompts(2, 7) % 60, torch.ones(2, 7, dtype=torch.long)
    real[1, :4] = 0
    whole = generate(model, ids, attention_mask=real, gen_length=3 * model.config.block_size, **settings)
    plain = generate(
        model, ids, attention_mask=real, gen_length=3 * model.config.block_size, cache="none", **settings
    )  # fmt: skip
    few = generate(model, ids, attention_mask=real, gen_length=3, **settings)
    assert torch.equal(whole, plain)
    assert torch.equal(few, whole[:, :10])


def test_wino_s_checks_of_a_transformers_model(model: Any) -> None:
    """The masks behind the canvas under a 4-D attention mask, with padding, on the tiny LLaDA."""
    settings = {"algorithm": "wino", "gen_length": 24, "block_length": 12, "threshold": 0.0, "threshold_back": 1.0}
    settings |= {"eos_token_id": None, "mask_token_id": 127, "temperature": 0.0}
    rows = [prompts(1, length, seed=length)[0].tolist() for length in (5, 9, 2)]
    ids = torch.tensor([[0] * (9 - len(row)) + row for row in rows])
    real = torch.tensor([[0] * (9 - len(row)) + [1] * len(row) for row in rows])
    together = generate(model, ids, attention_mask=real, output_history=True, return_dict_in_generate=True, **settings)
    taken_back = 0
    for before, after in pairwise(together.history):
        taken_back += int(((before.tokens != 127) & (after.tokens == 127)).sum())
    assert taken_back
    for row, line in zip(rows, together.sequences.tolist(), strict=True):
        alone = generate(model, torch.tensor([row]), **settings)
        assert alone[0].tolist() == line[9 - len(row) :]


def test_wino_takes_no_shifted_model() -> None:
    model = StandIn(family(shift=True, algorithm="llada"))
    with refused(SettingError, "algorithm", "wino", "unshifted"):
        generate(model, torch.tensor([[1, 2]]), algorithm="wino", gen_length=4)


@pytest.mark.parametrize("record", [record for record in RECORDS if record.get("model") == "dream"], ids=name_of)
def test_dream_s_caches(record: dict[str, Any], tmp_path: Path) -> None:
    """Alone, in a ragged batch, and in a batch that rows enter while others run."""
    model, mask = load_case(DREAM, tmp_path)
    settings = {
        "eos_token_id": None,
        "temperature": 0.0,
        "mask_token_id": mask,
        "pad_token_id": 0,
        **record["settings"],
    }
    prompts = record["prompts"]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    together = generate(model, ids, attention_mask=real, **settings)
    assert together[:, width:].tolist() == record["tokens"]
    for prompt, tokens, forwards in zip(prompts, record["tokens"], record["forwards"], strict=True):
        alone = generate(model, torch.tensor([prompt]), return_dict_in_generate=True, **settings)
        assert alone.sequences[0, len(prompt) :].tolist() == tokens
        skipped = record["settings"]["alg"] == "entropy"  # steps that commit nothing take no forward pass
        assert alone.forwards < forwards if skipped else alone.forwards == forwards
    batch = SamplingEngine(model, settings, max_rows=2, max_length=40)
    for number, prompt in enumerate(prompts):
        batch.submit(Request(number, prompt, 16, 0))
    ended = {}
    while not batch.idle:
        ended |= {event.name: list(event.tokens) for event in batch.step() if isinstance(event, Ended)}
    assert [ended[number] for number in range(len(prompts))] == record["tokens"]


def test_without_a_cache_dream_s_blocks_are_the_plain_algorithm() -> None:
    """Each block begins with the best token at its first column, then a threshold decides, all on the whole canvas."""
    model = NeverMask(family(name="dream", shift=True, algorithm="dream_block"), peak=3.0)
    rows, ids, mask = ragged((5, 9, 1, 8))
    output = generate(
        model, ids, attention_mask=mask, gen_length=12, block_length=4, threshold=0.4, eos_token_id=None
    )  # fmt: skip
    for row, line in zip(rows, output[:, 9:].tolist(), strict=True):
        canvas = row + [MASK] * 12
        for begin in range(len(row), len(canvas), 4):
            allowed = [begin]
            while allowed:
                found = model(torch.tensor([canvas])).logits[0].softmax(-1)
                best = max(allowed, key=lambda i: float(found[i - 1].max()))
                for i in allowed:
                    if i == best or float(found[i - 1].max()) >= 0.4:
                        canvas[i] = int(found[i - 1].argmax())
                allowed = [i for i in range(begin, begin + 4) if canvas[i] == MASK]
        assert line == canvas[len(row) :]


@pytest.mark.parametrize(
    ("settings", "field", "named"),
    [
        ({"alg": "entropy", "steps": 7}, "steps", "6 or 9"),
        ({"alg": "entropy", "steps": 3}, "steps", "6 or 9"),
        ({"alg_temp": 0.3}, "alg_temp", "alg=confidence_threshold"),
        ({"alg": "origin"}, "alg", "confidence_threshold, entropy"),
        ({"gen_length": 13}, "gen_length", "block_length=4"),
    ],
)
def test_what_dream_s_blocks_refuse(settings: dict[str, Any], field: str, named: str) -> None:
    model = StandIn(family(name="dream", shift=True, algorithm="dream_block"))
    with refused(SettingError, field, named):
        generate(model, torch.tensor([[1, 2]]), **{"gen_length": 12, "block_length": 4, **settings})


def test_dream_s_blocks_need_a_prompt() -> None:
    model = StandIn(family(name="dream", shift=True, algorithm="dream_block"))
    with refused(RowError, "row 0"):
        generate(model, torch.zeros(1, 0, dtype=torch.long), gen_length=4, block_length=4)
