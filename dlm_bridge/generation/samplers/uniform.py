"""Sampler for models trained with uniform noise: the canvas starts as random tokens, and any of them may change.

    canvas = prompt + random tokens
    for i in range(steps):
        x = softmax(logits / temperature)                 # at temperature 0 the best token's one-hot vector
        "posterior":     z ~ q(z_s | z_t) with a_t = i / steps, a_s = (i + 1) / steps
        "entropy_bound": draw from x; commit the lowest entropies while the sum of all but the largest is <= the bound,
                         replace the other positions by noise; in the last step take the best tokens

From noise level t to s a position's token z_t becomes z_s with probability

    q(z_s | z_t) = (a_t / a_s [z_s = z_t] + (1 - a_t / a_s) / N) * (a_s x(z_s) + (1 - a_s) / N) / Z

where N is the vocabulary size and a_t = 1 - t: the reverse of D3PM's uniform noise (arXiv 2107.03006) as UDLM samples
it (arXiv 2412.10193, its equation for the posterior, factored). "entropy_bound" is the rule of transformers'
DiffusionGemma, without its early stop and falling temperature, after entropy-bounded unmasking (arXiv 2505.24857).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout, Canvas
from dlm_bridge.generation.commit_rules import DenoisingRule, SamplerContext
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import Noise


@dataclass(frozen=True, kw_only=True)
class UniformSampler(Sampler):
    """Uniform-state diffusion, for models whose config names no mask token or that were trained this way.

    Args:
        steps: denoising steps.
        resampling: "posterior" or "entropy_bound", see above.
        entropy_bound: the bound of "entropy_bound".
    """

    name: ClassVar[str] = "uniform"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    needs_mask: ClassVar[bool] = False
    takes_commit_rule: ClassVar[bool] = False

    temperature: float = parameter(1.0, minimum=0)
    steps: int = parameter(128, minimum=1)
    resampling: str = parameter("posterior", choices=("posterior", "entropy_bound"))
    entropy_bound: float = parameter(0.1, minimum=0)

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        rule: ResamplingRule = PosteriorRule(self.steps)
        if self.resampling == "entropy_bound":
            rule = EntropyBoundResampling(self.steps, self.entropy_bound)
        return SamplerSpec(BlockLayout(self.gen_length, whole=True), rule, self.sampling())


class ResamplingRule(DenoisingRule):
    """Draws a block's tokens again in each of `steps` steps. The prediction x has the temperature and filters of the
    sampler; a mask token, if the model has one, is none of the N tokens."""

    edits = True

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @abstractmethod
    def next_tokens(
        self,
        index: int,
        x_ANV: torch.Tensor,
        tokens_AN: torch.Tensor,
        noise_V: torch.Tensor,
        uniform_ANV: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens after step `index` [A, N], and True [A, N] where they are replaced by noise.

        Args:
            x_ANV: float64 probabilities of the text.
            tokens_AN: the current tokens.
            noise_V: float64 probabilities of noise, 1 / N; 0 for the mask token.
            uniform_ANV: float64 numbers in [0, 1), to draw with.
        """

    def constrained(self, constraints: Constraints) -> DenoisingRule:
        constraints.refuse_text("a canvas of noise has no committed text")
        return self

    def denoise_block(self, context: SamplerContext, block: slice) -> Iterator[None]:
        """Fill the block with noise and denoise it. Every row takes every step."""
        canvas, noise, rows = context.canvas, context.noise, context.canvas.rows
        vocabulary, mask = context.vocabulary_size, canvas.mask_token_id
        count = vocabulary - (0 <= mask < vocabulary)
        new_AN = canvas.behind_prompt(None, block)
        canvas.tokens[:, block] = torch.where(new_AN, _noise(canvas, block, noise, count), canvas.tokens[:, block])
        canvas.tokens.masked_fill_(~canvas.real(None), 0)  # padding, which nothing attends to
        noise_V = torch.full((vocabulary,), 1 / count, dtype=torch.float64, device=canvas.tokens.device)
        if count < vocabulary:
            noise_V[mask] = 0.0
        pads = [max(0, origin - block.start) for origin in canvas.origins]
        for index in range(self.steps):
            logits = context.predict(rows, block)
            shaped = context.sampling.shape(logits).double()
            shaped = shaped.masked_fill(noise_V == 0, -torch.inf)
            x_ANV = shaped.softmax(dim=-1)
            if not context.sampling.draws:
                x_ANV = torch.zeros_like(x_ANV).scatter(-1, shaped.argmax(dim=-1, keepdim=True), 1.0)
            uniform_ANV = noise.per_token(rows, logits.shape[1], vocabulary, pads, [logits.shape[1]] * len(rows))
            before_AN = canvas.take(None, block)
            if any(canvas.holes):
                # Given tokens are certain, and padding is nothing: neither counts towards a bound on entropy.
                given_ANV = torch.zeros_like(x_ANV).scatter(-1, before_AN[..., None], 1.0)
                x_ANV = torch.where(new_AN[..., None], x_ANV, given_ANV)
            tokens_AN, renoised_AN = self.next_tokens(index, x_ANV, before_AN, noise_V, uniform_ANV)
            tokens_AN = torch.where(renoised_AN, _noise(canvas, block, noise, count), tokens_AN)
            canvas.put(None, block, torch.where(new_AN, tokens_AN, before_AN))
            context.callbacks.step(canvas, rows, block, logits, context.predictor.forwards, final=False)
            yield


class PosteriorRule(ResamplingRule):
    """Draws from q, from pure noise to text in equal steps. At temperature 0 the prediction x is its best token."""

    def next_tokens(
        self,
        index: int,
        x_ANV: torch.Tensor,
        tokens_AN: torch.Tensor,
        noise_V: torch.Tensor,
        uniform_ANV: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before, after = index / self.steps, (index + 1) / self.steps  # a_t, a_s
        stays = before / after
        jumps_ANV = (after * x_ANV + (1 - after) * noise_V) * ((1 - stays) * noise_V)
        now_AN1 = tokens_AN[..., None]
        stays_ANV = (after * x_ANV + (1 - after) * noise_V) * stays
        drawn_AN = _draw(jumps_ANV.scatter_add(-1, now_AN1, stays_ANV.gather(-1, now_AN1)), uniform_ANV)
        return drawn_AN, torch.zeros_like(drawn_AN, dtype=torch.bool)


class EntropyBoundResampling(ResamplingRule):
    """Accepts draws of the lowest entropies while all but the largest add up to at most the bound, and replaces the
    other positions by noise. The last step takes the best tokens."""

    def __init__(self, steps: int, bound: float) -> None:
        super().__init__(steps)
        self._bound = bound

    def next_tokens(
        self,
        index: int,
        x_ANV: torch.Tensor,
        tokens_AN: torch.Tensor,
        noise_V: torch.Tensor,
        uniform_ANV: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.steps - 1:
            return x_ANV.argmax(dim=-1), torch.zeros_like(tokens_AN, dtype=torch.bool)
        entropies_AN = -(x_ANV * x_ANV.clamp(min=1e-300).log()).sum(dim=-1)
        ordered_AN, order_AN = entropies_AN.sort(dim=1, stable=True)
        passed_AN = ordered_AN.cumsum(dim=1) - ordered_AN <= self._bound
        accepted_AN = torch.zeros_like(passed_AN).scatter(1, order_AN, passed_AN)
        return _draw(x_ANV, uniform_ANV), ~accepted_AN


def _noise(canvas: Canvas, block: slice, noise: Noise, count: int) -> torch.Tensor:
    """[A, N] of `count` equally likely tokens; the mask token is none of them."""
    uniform_AS = noise.per_position(canvas.rows, canvas.width, canvas.origins, canvas.stops)
    tokens_AN = (uniform_AS[:, block].double() * count).long().clamp(max=count - 1)
    return torch.where((tokens_AN >= canvas.mask_token_id) & (canvas.mask_token_id >= 0), tokens_AN + 1, tokens_AN)


def _draw(weights_ANV: torch.Tensor, uniform_ANV: torch.Tensor) -> torch.Tensor:
    """[A, N], drawn in proportion to the weights, by the Gumbel-max trick."""
    return (weights_ANV.log() - uniform_ANV.log().neg().log()).argmax(dim=-1)
