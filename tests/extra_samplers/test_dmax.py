"""DMax: soft embeddings by hand, and the sampler against the algorithm as a loop over one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlm_bridge.attention.masks import block_causal_mask
from dlm_bridge.errors import SettingError
from dlm_bridge.generation import generate
from dlm_bridge.generation.runtime.runner import soft_embeddings
from tests.families import llada2_moe, sdar
from tests.families.case import FamilyCase
from tests.generation.standin import StandIn, family
from tests.generation.test_caches import load_case
from tests.refusals import refused

BLOCK = 4


def soft(token: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    mixed = probability * token + (1 - probability) * mask
    return mixed / mixed.norm() * (probability * token.norm() + (1 - probability) * mask.norm())


def test_soft_embeddings_by_hand() -> None:
    embed = nn.Embedding(7, 5, dtype=torch.float64)
    tokens, weights = torch.tensor([[3, 6, 2], [0, 1, 6]]), torch.tensor([[0.0, 0.0, 0.3], [1.0, 0.75, 0.0]])
    found = soft_embeddings(embed, tokens, weights, 6)
    table = embed.weight.detach()
    for row in range(2):
        for column in range(3):
            expected = soft(table[tokens[row, column]], table[6], 1 - weights[row, column].item())
            torch.testing.assert_close(found[row, column].detach(), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[weights == 0], embed(tokens)[weights == 0])
    half = embed.bfloat16()
    assert torch.equal(soft_embeddings(half, tokens, torch.zeros(2, 3), 6), half(tokens))


class Loop:
    """A row alone. Every pass runs the whole text by the model's own forward pass, without a cache."""

    def __init__(self, model: Any, mask: int, prompt: list[int], count: int, width: int, threshold: float, add: float):
        self.model, self.mask, self.threshold, self.add, self.width = model, mask, threshold, add, width
        self.text = prompt + [mask] * (count + width * BLOCK)
        self.soft = [1.0] * len(self.text)  # the probabilities of the embeddings
        self.prompt, self.end = len(prompt), len(prompt) + count
        self.final: set[int] = set()
        self.age: dict[int, int] = {}
        self.passes = self.rewritten = self.most = 0

    def places(self, block: int) -> range:
        return range(block * BLOCK, (block + 1) * BLOCK)

    def done(self, block: int) -> float:
        filled = sum(self.text[place] != self.mask for place in self.places(block)) / BLOCK
        return filled if block in self.final else min(filled, 1 - 0.5 / BLOCK)

    def run(self) -> tuple[list[int], int]:
        first, started, cached = self.prompt // BLOCK, int(self.prompt % BLOCK > 0), 0
        while True:
            first, started, cached = first + cached, started - cached, 0
            while cached < started and first + cached in self.final:
                cached += 1
            if not started or (started < self.width and self.done(first + started - 1) >= self.add):
                started += 1
            if self.step(range(first + cached, first + started), first + self.width):
                return self.text[self.prompt : self.end], self.passes

    def step(self, active: range, blocks: int) -> bool:
        """Returns True at the end."""
        length = blocks * BLOCK
        table = self.model.get_input_embeddings().weight
        tokens, masks = table[self.text[:length]], table[self.mask].expand(length, -1)
        p = torch.tensor(self.soft[:length], dtype=torch.float64)[:, None]
        norms = p * tokens.norm(dim=1, keepdim=True) + (1 - p) * masks.norm(dim=1, keepdim=True)
        embeddings = nn.functional.normalize(p * tokens + (1 - p) * masks, dim=1) * norms
        mask = block_causal_mask(torch.arange(length)[None], BLOCK)
        logits = self.model(inputs_embeds=embeddings[None], attention_mask=mask).logits[0]
        proposed = logits.clone()
        proposed[:, self.mask] = -torch.inf
        best = proposed.argmax(-1).tolist()
        sure = logits.softmax(-1).gather(1, proposed.argmax(-1, keepdim=True))[:, 0].tolist()
        self.passes += 1
        most = 0
        for block in active:
            new = [place for place in self.places(block) if place >= self.prompt]
            masked = [place for place in new if self.text[place] == self.mask]
            taken = []
            for place in masked:
                if sure[place] < self.threshold:
                    break
                taken.append(place)
            taken = taken or masked[:1]
            written = [place for place in new if place in taken or place not in masked]
            changed = [place for place in written if self.text[place] != best[place]]
            self.rewritten += sum(place not in masked for place in changed)
            most += bool(taken)
            self.age[block] = self.age.get(block, 0) + 1
            for place in written:
                self.text[place], self.soft[place] = best[place], sure[place]
            stable = not changed or all(sure[place] >= 0.9 for place in new) or self.age[block] >= BLOCK
            self.final.discard(block)
            if len(taken) == len(masked) and stable:
                self.final.add(block)
                for place in written:
                    self.soft[place] = 1.0
        self.most = max(self.most, most)
        return {*range(active.start, -(-self.end // BLOCK))} <= self.final


@pytest.mark.parametrize("cache", ["none", "block"])
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (sdar.CASES[0], {}),
        (sdar.CASES[0], {"buffer_size": 3, "threshold": 0.1, "block_add_threshold": 0.25}),
        pytest.param(sdar.CASES[0], {"buffer_size": 1, "threshold": 0.05}, marks=pytest.mark.slow),
        pytest.param(llada2_moe.CASES[0], {"threshold": 0.1, "block_add_threshold": 0.5}, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "id", None) or "-".join(map(str, value.values())),
)
def test_tokens_and_forward_passes_are_those_of_the_loop(
    case: FamilyCase, settings: dict[str, Any], cache: str, tmp_path: Path
) -> None:
    """Float64; prompts with no whole block, with some, and with nothing else; each alone, and in a batch."""
    model, mask = load_case(case, tmp_path)
    model.config.block_size = BLOCK
    with torch.no_grad():
        model.get_output_embeddings().weight.div_(4)  # less certain
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(4, 60, (length,), generator=generator).tolist() for length in (2, BLOCK + 3, 2 * BLOCK)]
    chosen = {"buffer_size": 2, "threshold": 0.5, "block_add_threshold": 1.0} | settings
    arguments: dict[str, Any] = {"algorithm": "dmax", "gen_length": 11, "temperature": 0.0, "cache": cache}
    arguments |= {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, **settings}
    rewritten, most, expected = 0, 0, []
    for row in rows:
        loop = Loop(
            model, mask, row, 11, chosen["buffer_size"], chosen["threshold"], chosen["block_add_threshold"]
        )  # fmt: skip
        tokens, count = loop.run()
        alone = generate(model, torch.tensor([row]), return_dict_in_generate=True, **arguments)
        assert alone.sequences[0, len(row) :].tolist() == tokens
        prompts = int(cache == "block" and len(row) >= BLOCK)
        assert alone.forwards == count + prompts
        expected.append(tokens)
        rewritten, most = rewritten + loop.rewritten, max(most, loop.most)
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    together = generate(model, ids, attention_mask=real, **arguments)
    assert together[:, width:].tolist() == expected
    assert rewritten > 0
    assert (most > 1) == (chosen["block_add_threshold"] < 1)


def test_merging_changes_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixtures reach the model: without them, other tokens come out."""
    model, mask = load_case(sdar.CASES[0], tmp_path)
    with torch.no_grad():
        model.get_output_embeddings().weight.div_(4)
    settings: dict[str, Any] = {"algorithm": "dmax", "gen_length": 16, "block_length": BLOCK, "temperature": 0.0}
    settings |= {"mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, "threshold": 0.1}
    merged = generate(model, torch.tensor([[5, 6, 7]]), **settings)
    from dlm_bridge.generation.runtime import runner

    monkeypatch.setattr(runner, "soft_embeddings", lambda embed, token_ids, *others: embed(token_ids))
    assert not torch.equal(generate(model, torch.tensor([[5, 6, 7]]), **settings), merged)


def test_what_it_refuses() -> None:
    model = StandIn(family("block_causal", shift=True, algorithm="fast_dllm_v2"), block_size=BLOCK)
    with refused(SettingError, "algorithm", "dmax", "unshifted"):
        generate(model, torch.tensor([[1, 2]]), algorithm="dmax", gen_length=4)
