"""DiffuLLaMA's sampler, `generate_samples` (arXiv 2410.17891).

    canvas = prompt + [MASK] * gen_length
    for k in range(steps):
        tokens = draw(softmax(logits / temperature), top_p)
        commit each mask with probability 1 / (steps - k)

Source: HKUNLP/DiffuLLaMA c17e897, `generate_samples`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.samplers.dream import AncestralRule


@dataclass(frozen=True, kw_only=True)
class DiffuLLaMASampler(Sampler):
    """DiffuLLaMA's `generate_samples`."""

    name: ClassVar[str] = "diffullama"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    aliases: ClassVar[Mapping[str, str]] = {
        "diffusion_steps": "steps", "logits_temp": "temperature", "topp_temp": "top_p",
    }  # fmt: skip
    published_names: ClassVar[tuple[str, ...]] = tuple(aliases)
    presets: ClassVar[Presets] = {"careful": {"steps": 256}}

    temperature: float = parameter(0.9, "0: greedy decoding; published as `logits_temp`.")
    steps: int = parameter(64, "Denoising steps in total; published as `diffusion_steps`.")
    top_p: float | None = parameter(
        0.9, "Sample from the most probable tokens, up to a total probability of p; published as `topp_temp`."
    )

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            layout=BlockLayout(None),
            rule=AncestralRule(self.steps, eps=0.0),
            sampling=self.sampling(),
        )
