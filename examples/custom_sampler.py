"""A sampler of your own: it commits `width` masks a step, from right to left."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlm_bridge.generation import (
    BlockLayout,
    CommitRule,
    Sampler,
    SamplerSpec,
    SpecialTokens,
    Step,
    parameter,
    register_sampler,
)


class RightToLeft(CommitRule):
    """Commits the last masks of the block."""

    def __init__(self, width: int) -> None:
        self.width = width

    def begin(self, masks: list[int], noise: Any) -> list[list[int]]:
        """Masks that each step commits at least, for every row."""
        return [[min(self.width, count - done) for done in range(0, count, self.width)] for count in masks]

    def select(self, step: Step) -> torch.Tensor:
        """[rows, columns], True at the masks that are committed now."""
        return step.masked & (step.masked.flip(1).cumsum(1).flip(1) <= self.width)


@dataclass(frozen=True, kw_only=True)
class RightToLeftSampler(Sampler):
    """Fills each block from right to left.

    Args:
        block_length: tokens that are denoised together.
        width: tokens that a step commits.
    """

    name: ClassVar[str] = "right_to_left"
    attention_patterns: ClassVar[tuple[str, ...]] = ("bidirectional",)
    block_length: int = parameter(16, minimum=1)
    width: int = parameter(2, minimum=1)

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(BlockLayout(self.block_length), RightToLeft(self.width), self.sampling())


register_sampler(RightToLeftSampler)
model = AutoModelForCausalLM.from_pretrained("demo-output/llada")
tokenizer = AutoTokenizer.from_pretrained("demo-output/llada")
ids = tokenizer("Tom was a", return_tensors="pt").input_ids
output = model.generate(ids, algorithm="right_to_left", block_length=4, width=1, gen_length=128)
print(tokenizer.decode(output[0], skip_special_tokens=True))
