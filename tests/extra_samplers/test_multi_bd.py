"""The Block Buffer against the algorithm as a loop over one row, without caches or batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.attention.masks import block_causal_mask
from dlm_bridge.errors import SettingError
from dlm_bridge.generation import generate
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.request import Ended, Request
from dlm_bridge.generation.runtime import runner
from dlm_bridge.generation.runtime.graphs import BodyInputs
from tests.extra_samplers.test_recorded_samplers import NeverMask
from tests.families.case import FamilyCase, some_slow
from tests.generation.standin import MASK, StandIn, family, ragged
from tests.generation.test_caches import WITH_BLOCK_CACHE, load_case
from tests.generation.test_varlen import packed_calls  # noqa: F401  a fixture
from tests.refusals import refused

BLOCK = 4


def loop(
    model: Any,
    prompt: list[int],
    count: int,
    *,
    buffer_size: int = 2,
    threshold: float = 0.95,
    block_add_threshold: float = 0.1,
    semi_complete_threshold: float = 0.9,
) -> tuple[list[int], int, int]:
    """`count` new tokens of a row alone, the number of forward passes, and the largest number of blocks that had masks
    and received tokens in one pass. Every pass runs the whole text."""
    text = prompt + [MASK] * (count + buffer_size * BLOCK)
    first = len(prompt) // BLOCK  # block of the buffer
    started = 1 if len(prompt) % BLOCK else 0
    passes = most = cached = 0
    while MASK in text[: len(prompt) + count]:

        def done(block: int) -> float:
            return 1 - text[block * BLOCK : (block + 1) * BLOCK].count(MASK) / BLOCK

        first, started = first + cached, started - cached
        cached = 0
        while cached < started and done(first + cached) == 1:
            cached += 1
        if not started or (started < buffer_size and done(first + started - 1) >= block_add_threshold):
            started += 1
        tokens = torch.tensor([text])
        mask = block_causal_mask(torch.arange(len(text))[None], BLOCK)
        logits = model(tokens, attention_mask=mask).logits[0].clone()
        logits[:, MASK] = -torch.inf
        scores, best = logits.softmax(-1).max(-1)
        written = {}
        for block in range(first, first + started):
            masked = [place for place in range(block * BLOCK, (block + 1) * BLOCK) if text[place] == MASK]
            picked = [place for place in masked if scores[place] > threshold]
            if masked and not picked and (block == 0 or done(block - 1) >= semi_complete_threshold):
                picked = [max(masked, key=lambda place: float(scores[place]))]
            written |= {place: int(best[place]) for place in picked}
        for place, token in written.items():
            text[place] = token
        most = max(most, len({place // BLOCK for place in written}))
        passes += 1
    return text[len(prompt) : len(prompt) + count], passes, most


@pytest.mark.parametrize(
    "settings",
    [
        {"buffer_size": 1, "threshold": 0.4},
        {"buffer_size": 2, "threshold": 0.4},
        {"buffer_size": 3, "threshold": 0.3, "block_add_threshold": 0.5, "semi_complete_threshold": 0.5},
        {"buffer_size": 4, "threshold": 0.95, "semi_complete_threshold": 0.25},
        {"buffer_size": 4, "threshold": 0.6, "block_add_threshold": 1.0},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_tokens_and_forward_passes_are_those_of_the_loop(settings: dict[str, Any]) -> None:
    """Rows of a ragged batch, and each row alone. The mask token is likely, but never proposed."""
    model = StandIn(family("block_causal", algorithm="llada2"), seed=3, peak=3.0, block_size=BLOCK)
    rows, ids, mask = ragged((5, 9, 2, 8, 16), seed=3)
    arguments = {"algorithm": "multi_bd", "gen_length": 18, "eos_token_id": None, **settings}
    together = generate(model, ids, attention_mask=mask, return_dict_in_generate=True, **arguments)
    passes, blocks = [], 0
    for row, line in zip(rows, together.sequences[:, 16:].tolist(), strict=True):
        tokens, count, most = loop(model, row, 18, **settings)
        assert line == tokens
        alone = generate(model, torch.tensor([row]), return_dict_in_generate=True, **arguments)
        assert alone.sequences[0, len(row) :].tolist() == tokens
        assert alone.forwards == count
        passes.append(count)
        blocks = max(blocks, most)
    assert together.forwards == max(passes)
    assert len({*passes}) > 1  # rows are in different states
    assert blocks > 1 or settings["buffer_size"] == 1 or settings["block_add_threshold"] == 1


@pytest.mark.parametrize("sampler", ["llada2", "sdar"])
def test_a_buffer_of_one_block_gives_the_family_s_tokens(sampler: str) -> None:
    model = NeverMask(family("block_causal", algorithm=sampler), seed=1, peak=3.0, block_size=BLOCK)
    _, ids, mask = ragged((5, 9, 2, 8))
    settings = {"attention_mask": mask, "gen_length": 18, "threshold": 0.5, "temperature": 0.0, "eos_token_id": None}
    settings |= {"return_dict_in_generate": True}
    expected = generate(model, ids, steps=BLOCK, **settings)
    found = generate(model, ids, algorithm="multi_bd", buffer_size=1, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    several = generate(model, ids, algorithm="multi_bd", buffer_size=3, **settings)
    assert several.forwards < expected.forwards < found.forwards


UNSHIFTED = [
    case for case in WITH_BLOCK_CACHE if case.spec.attention_pattern == "block_causal" and not case.spec.shift
]
SDAR = next(case for case in UNSHIFTED if case.spec.name == "sdar")


@pytest.mark.parametrize("case", some_slow(UNSHIFTED, *(case.id for case in UNSHIFTED if case is not SDAR)))
def test_the_block_cache_changes_no_token(case: FamilyCase, tmp_path: Path) -> None:
    """Float32; prompts with no whole block, with some, and with nothing else; also rows that enter later."""
    model, mask = load_case(case, tmp_path)
    model, block = model.float(), model.config.block_size
    settings: dict[str, Any] = {"algorithm": "multi_bd", "buffer_size": 2, "threshold": 0.3, "temperature": 0.0}
    settings |= {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None}
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(4, 60, (length,), generator=generator) for length in (2, block + 3, 2 * block)]
    plain = [generate(model, row[None], cache="none", gen_length=3 * block, **settings)[0, len(row) :] for row in rows]
    for row, tokens in zip(rows, plain, strict=True):
        cached = generate(
            model, row[None], cache="block", gen_length=3 * block, return_dict_in_generate=True, **settings
        )
        assert torch.equal(cached.sequences[0, len(row) :], tokens)
    engine = SamplingEngine(model, settings | {"cache": "block"}, max_rows=2, max_length=5 * block)
    for number, row in enumerate(rows):
        engine.submit(Request(number, row.tolist(), 3 * block, 0))
    ended = {}
    while not engine.idle:
        ended |= {event.name: list(event.tokens) for event in engine.step() if isinstance(event, Ended)}
    assert [ended[number] for number in range(3)] == [tokens.tolist() for tokens in plain]


def test_one_forward_pass_runs_the_buffer_and_caches_a_block(tmp_path: Path) -> None:
    """After the prompt, each pass runs buffer_size blocks, whatever their states; none only fills the cache."""
    model, mask = load_case(SDAR, tmp_path)
    block = model.config.block_size
    widths: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    output = generate(
        model,
        torch.arange(5, 5 + 2 * block + 1)[None],
        algorithm="multi_bd",
        buffer_size=3,
        threshold=0.3,
        temperature=0.0,
        gen_length=4 * block,
        mask_token_id=mask,
        pad_token_id=0,
        eos_token_id=None,
        output_history=True,
        return_dict_in_generate=True,
    )
    assert widths == [2 * block] + [3 * block] * (output.forwards - 1)
    assert all(bool(step.committed.any()) for step in output.history)
    assert len(output.history) == output.forwards - 1


@pytest.mark.parametrize(
    ("settings", "field", "named"),
    [
        ({"buffer_size": 0}, "buffer_size", "0"),
        ({"add_block_threshold": 1.5}, "add_block_threshold", "1.5"),
        ({"infill": True}, "infill", "multi_bd"),
    ],
)
def test_what_it_refuses(settings: dict[str, Any], field: str, named: str) -> None:
    model = StandIn(family("block_causal", algorithm="llada2"), block_size=BLOCK)
    with refused(SettingError, field, named):
        generate(model, torch.tensor([[1, 2]]), algorithm="multi_bd", **settings)


def test_it_takes_no_shifted_model() -> None:
    model = StandIn(family("block_causal", shift=True, algorithm="fast_dllm_v2"), block_size=BLOCK)
    with refused(SettingError, "algorithm", "multi_bd", "unshifted"):
        generate(model, torch.tensor([[1, 2]]), algorithm="multi_bd", gen_length=4)


@pytest.mark.parametrize("cache", ["none", "block"])
def test_rows_run_without_their_padding(
    cache: str,
    packed_calls: list[BodyInputs],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU in half precision: prompts of different lengths or, without a cache, whole rows."""
    model, mask = load_case(SDAR, tmp_path)
    tokens = torch.randint(4, 60, (3, 19), generator=torch.Generator().manual_seed(5))
    real = torch.arange(19) >= 19 - torch.tensor([3, 19, 10])[:, None]
    settings = {"algorithm": "multi_bd", "buffer_size": 2, "threshold": 0.3, "temperature": 0.0, "cache": cache}
    settings |= {"gen_length": 12, "mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None}
    found = generate(model, tokens, attention_mask=real.long(), **settings)
    assert len(packed_calls) == 1 or cache == "none"
    assert all(inputs.blocks is not None and inputs.attended is None for inputs in packed_calls)
    packed_calls.clear()
    monkeypatch.setattr(runner, "supports_packing", lambda model: False)
    expected = generate(model, tokens, attention_mask=real.long(), **settings)
    assert not packed_calls
    assert torch.equal(found, expected)
