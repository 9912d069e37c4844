"""Sampler for models trained with uniform noise: the canvas starts as random tokens, all of which may change.

    canvas = prompt + random tokens
    for i in range(steps):
        x = softmax(logits / temperature)                 # at temperature 0 the best token's one-hot vector
        "posterior":     z ~ q(z_s | z_t) with a_t = i / steps, a_s = (i + 1) / steps
        "entropy_bound": draw from x; commit the lowest entropies while their sum, without the largest, is at most
                         the bound; replace the other positions by noise; the last step takes the best tokens

From noise level t to s a position's token z_t becomes z_s with probability

    q(z_s | z_t) = (a_t / a_s [z_s = z_t] + (1 - a_t / a_s) / N) * (a_s x(z_s) + (1 - a_s) / N) / Z

where N is the vocabulary size and a_t = 1 - t: the reverse of D3PM's uniform noise (arXiv 2107.03006) as UDLM samples
it (arXiv 2412.10193, its equation for the posterior, factored). With `p_uniform` the noise is GIDD's hybrid of masks
and random tokens (arXiv 2503.04482): the canvas starts as masks, and with its probabilities b_t(z) of noise

    q(z_s | z_t) = (a_t / a_s [z_s = z_t] + b_t(z_t) - a_t / a_s b_s(z_t)) * (a_s x(z_s) + b_s(z_s)) / Z

GIDD's own sampler goes from t = 1 - 1e-4 to 1e-4; this one goes from 1 to 0, so that no mask remains.

"entropy_bound" is the rule of transformers' DiffusionGemma without its early stop and temperature schedule, based on
entropy-bounded unmasking (arXiv 2505.24857).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import SettingError
from dlm_bridge.generation.canvas import BlockLayout, to_device
from dlm_bridge.generation.commit_rules import DenoisingRule, SamplerContext
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.samplers import Presets, Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import invert
from dlm_bridge.objectives.base import NoiseName
from dlm_bridge.objectives.noise import NoiseProcess, random_tokens
from dlm_bridge.objectives.registry import noise_process


@dataclass(frozen=True, kw_only=True)
class UniformSampler(Sampler):
    """Uniform-state diffusion, for models whose config names no mask token or that were trained this way."""

    name: ClassVar[str] = "uniform"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    needs_mask: ClassVar[bool] = False
    takes_commit_rule: ClassVar[bool] = False
    noise_processes: ClassVar[tuple[NoiseName, ...]] = ("uniform", "hybrid")
    presets: ClassVar[Presets] = {"fast": {"steps": 64}, "careful": {"steps": 512}}

    temperature: float = parameter(1.0)
    steps: int = parameter(128, "Denoising steps in total.")
    resampling: str = parameter(
        "posterior", "Rule of a step: posterior or entropy_bound.", choices=("posterior", "entropy_bound")
    )
    entropy_bound: float = parameter(0.1, "Bound of `resampling=entropy_bound`.", minimum=0)
    p_uniform: float | None = parameter(
        None,
        "Fraction of random tokens at noise level 1/2, for a model trained with a hybrid of masks and random tokens; "
        "None: no masks.",
        above=0,
        below=1,
    )

    @classmethod
    def model_parameters(cls, config: Any) -> dict[str, Any]:
        return {"p_uniform": config.p_uniform} if noise_process(config) == "hybrid" else {}

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        rule: ResamplingRule = PosteriorRule(self.steps, NoiseProcess(self.p_uniform))
        if self.resampling == "entropy_bound":
            if self.p_uniform is not None:
                raise SettingError(
                    "resampling", "entropy_bound has no masks: a model with hybrid noise needs posterior"
                )
            rule = EntropyBoundResampling(self.steps, self.entropy_bound)
        return SamplerSpec(BlockLayout(None), rule, self.sampling())


class ResamplingRule(DenoisingRule):
    """Draws the block's tokens again in each of `steps` steps. The prediction x includes the sampler's temperature and
    filters; a mask token, if the model has one, is not one of the N tokens."""

    edits = True
    keeps_text = True

    def __init__(self, steps: int, process: NoiseProcess) -> None:
        self.steps = steps
        self.process = process

    @abstractmethod
    def next_tokens(
        self,
        index_A: torch.Tensor,
        x_ANV: torch.Tensor,
        tokens_AN: torch.Tensor,
        noise_V: torch.Tensor,
        uniform_AN: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens [A, N] after a step, and True [A, N] where noise replaces them.

        Args:
            index_A: float64, index of each row's step.
            x_ANV: float64 probabilities of the text.
            tokens_AN: current tokens.
            noise_V: float64 probabilities of noise: 1 / N, and 0 for the mask token.
            uniform_AN: float64 random numbers on (0, 1).
        """

    def constrained(self, constraints: Constraints) -> DenoisingRule:
        constraints.refuse_text("a canvas of noise has no committed text")
        return self

    def begin_block(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Fill the block with noise."""
        canvas = context.canvas
        selected = context.selected(rows)
        start_AN = _noise(context, block, rows)
        if self.process.p_uniform is not None:
            start_AN = torch.full_like(start_AN, MASK)
        new_AN = canvas.behind_prompt(selected, block)
        canvas.put(selected, block, torch.where(new_AN, start_AN, canvas.take(selected, block)))
        return rows

    def denoise_step(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        """Draw the block's tokens again. Every row takes every step."""
        canvas = context.canvas
        vocabulary, mask = context.vocabulary_size, canvas.excluded_token_id
        selected = context.selected(rows)
        count = vocabulary - (0 <= mask < vocabulary)
        noise_V = torch.full((vocabulary,), 1 / count, dtype=torch.float64, device=canvas.tokens.device)
        if count < vocabulary:
            noise_V[mask] = 0.0
        logits = context.predict(rows, block)
        shaped = context.sampling.shape(logits).double()
        shaped = shaped.masked_fill(noise_V == 0, -torch.inf)
        x_ANV = shaped.softmax(dim=-1)
        if not context.sampling.draws:
            x_ANV = torch.zeros_like(x_ANV).scatter(-1, shaped.argmax(dim=-1, keepdim=True), 1.0)
        uniform_AN = context.noise.uniform(rows, canvas.places(selected, block))
        before_AN, new_AN = canvas.take(selected, block), canvas.behind_prompt(selected, block)
        # The process draws the mask token like any other.
        now_AN = before_AN.masked_fill(before_AN == MASK, max(mask, 0))
        if canvas.has_holes or min(canvas.stops[row] for row in rows) < block.stop:
            # Prompt tokens and padding have zero entropy.
            given_ANV = torch.zeros_like(x_ANV).scatter(-1, now_AN[..., None], 1.0)
            x_ANV = torch.where(new_AN[..., None], x_ANV, given_ANV)
        steps = canvas.steps(rows)
        index_A = to_device(steps, logits.device).double()
        tokens_AN, renoised_AN = self.next_tokens(index_A, x_ANV, now_AN, noise_V, uniform_AN)
        tokens_AN = torch.where(renoised_AN, _noise(context, block, rows), tokens_AN)
        if context.text is not None:
            text_AN = context.text.finish(rows, block, logits, tokens_AN, context.sampling)
            tokens_AN = torch.where((index_A == self.steps - 1)[:, None], text_AN, tokens_AN)
        tokens_AN = tokens_AN.masked_fill(tokens_AN == mask, MASK)
        canvas.put(selected, block, torch.where(new_AN, tokens_AN, before_AN))
        context.report(rows, block, logits, final=False)
        return [row for row, done in zip(rows, steps, strict=True) if done + 1 < self.steps]


class PosteriorRule(ResamplingRule):
    """Draws from q, from pure noise to text in equal steps. At temperature 0, x is one-hot at its best token."""

    def next_tokens(
        self,
        index_A: torch.Tensor,
        x_ANV: torch.Tensor,
        tokens_AN: torch.Tensor,
        noise_V: torch.Tensor,
        uniform_AN: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        levels_2A = torch.stack([1 - index_A / self.steps, 1 - (index_A + 1) / self.steps])
        keep, masked, replaced = self.process.probabilities(levels_2A[..., None, None])
        is_mask_V = (noise_V == 0).double()
        before_A1V, after_A1V = (masked[at] * is_mask_V + replaced[at] * noise_V for at in (0, 1))  # b_t, b_s
        stays_A11 = keep[0] / keep[1]
        text_ANV = keep[1] * x_ANV + after_A1V
        now_AN1 = tokens_AN[..., None]
        jumps_ANV = text_ANV * (before_A1V - stays_A11 * after_A1V).expand_as(x_ANV).gather(-1, now_AN1)
        drawn_AN = invert(jumps_ANV.scatter_add(-1, now_AN1, stays_A11 * text_ANV.gather(-1, now_AN1)), uniform_AN)
        return drawn_AN, torch.zeros_like(drawn_AN, dtype=torch.bool)


class EntropyBoundResampling(ResamplingRule):
    """Accepts the draws of lowest entropy while their sum, without the largest, is at most the bound, and replaces the
    other positions by noise. The last step takes the best tokens."""

    def __init__(self, steps: int, bound: float) -> None:
        super().__init__(steps, NoiseProcess())
        self._bound = bound

    def next_tokens(
        self,
        index_A: torch.Tensor,
        x_ANV: torch.Tensor,
        tokens_AN: torch.Tensor,
        noise_V: torch.Tensor,
        uniform_AN: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entropies_AN = -(x_ANV * x_ANV.clamp(min=1e-300).log()).sum(dim=-1)
        ordered_AN, order_AN = entropies_AN.sort(dim=1, stable=True)
        passed_AN = ordered_AN.cumsum(dim=1) - ordered_AN <= self._bound
        accepted_AN = torch.zeros_like(passed_AN).scatter(1, order_AN, passed_AN)
        last_A1 = (index_A == self.steps - 1)[:, None]
        return torch.where(last_A1, x_ANV.argmax(dim=-1), invert(x_ANV, uniform_AN)), ~(accepted_AN | last_A1)


def _noise(context: SamplerContext, block: slice, rows: list[int]) -> torch.Tensor:
    """[A, N] uniformly random tokens, never the mask token."""
    canvas = context.canvas
    uniform_AN = context.noise.uniform(rows, canvas.places(context.selected(rows), block))
    return random_tokens(uniform_AN, context.vocabulary_size, canvas.excluded_token_id)
