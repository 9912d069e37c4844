"""Sampling without a mask token: the canvas is random tokens, and every step may change any of them.

Uniform-state diffusion replaces a token by a random one of the vocabulary, N tokens large, instead of masking it. From
noise level t to s a position's token z_t becomes z_s with probability

    q(z_s | z_t) = (a_t / a_s [z_s = z_t] + (1 - a_t / a_s) / N) * (a_s x(z_s) + (1 - a_s) / N) / Z

where a_t = 1 - t is what is left of the text and x the model's prediction of it: the reverse of D3PM's uniform noise
(arXiv 2107.03006) as UDLM samples it (arXiv 2412.10193, its equation for the posterior, factored).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from dlm_bridge.generation.canvas import Canvas
from dlm_bridge.generation.commit_rules import SamplerContext
from dlm_bridge.generation.token_sampling import Noise


class ResamplingRule(ABC):
    """Chooses a block's tokens anew in each of `steps` steps. The prediction x has the temperature and filters of the
    sampler; a mask token, where the model has one, is none of the N tokens."""

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
            tokens_AN: what stands there now.
            noise_V: float64 probabilities of noise, 1 / N; 0 for the mask token.
            uniform_ANV: float64 numbers in [0, 1), to draw with.
        """


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
    """Accepts draws of the lowest entropies, as long as all but the largest add up to at most the bound, and makes
    noise of all other positions. The last step gives the best tokens.

    As transformers' DiffusionGemma does (its early stop and falling temperature are not part of it), after
    entropy-bounded unmasking (arXiv 2505.24857).
    """

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


def resample_block(work: SamplerContext, block: slice) -> None:
    """Fill the block with noise and let the recipe's rule make text of it. Every row takes every step."""
    canvas, recipe, noise, vocabulary = work.canvas, work.recipe, work.noise, work.vocabulary
    rule, rows = recipe.rule, canvas.rows
    assert isinstance(rule, ResamplingRule)
    mask = canvas.mask_token_id
    count = vocabulary - (0 <= mask < vocabulary)
    new_AN = canvas.behind_prompt(None, block)
    canvas.tokens[:, block] = torch.where(new_AN, _noise(canvas, block, noise, count), canvas.tokens[:, block])
    canvas.tokens.masked_fill_(~canvas.real(None), 0)  # padding, which nobody looks at
    noise_V = torch.full((vocabulary,), 1 / count, dtype=torch.float64, device=canvas.tokens.device)
    if count < vocabulary:
        noise_V[mask] = 0.0
    pads = [max(0, origin - block.start) for origin in canvas.origins]
    for index in range(rule.steps):
        logits = work.constraints(work.predictor(None, block), canvas, rows, block)
        shaped = recipe.sampling.shape(logits).double()
        shaped = shaped.masked_fill(noise_V == 0, -torch.inf)
        x_ANV = shaped.softmax(dim=-1)
        if not recipe.sampling.draws:
            x_ANV = torch.zeros_like(x_ANV).scatter(-1, shaped.argmax(dim=-1, keepdim=True), 1.0)
        uniform_ANV = noise.per_token(rows, logits.shape[1], vocabulary, pads)
        before_AN = canvas.take(None, block)
        if any(canvas.holes):
            # What is given is certain, and padding is nothing: of no account to a bound on what a step may settle.
            given_ANV = torch.zeros_like(x_ANV).scatter(-1, before_AN[..., None], 1.0)
            x_ANV = torch.where(new_AN[..., None], x_ANV, given_ANV)
        tokens_AN, renoised_AN = rule.next_tokens(index, x_ANV, before_AN, noise_V, uniform_ANV)
        tokens_AN = torch.where(renoised_AN, _noise(canvas, block, noise, count), tokens_AN)
        canvas.put(None, block, torch.where(new_AN, tokens_AN, before_AN))
        work.observer.step(canvas, rows, block, logits, work.predictor.forwards, final=False)


def _noise(canvas: Canvas, block: slice, noise: Noise, count: int) -> torch.Tensor:
    """[A, N] of `count` tokens, each as likely; the mask token is none of them."""
    uniform_AS = noise.per_position(canvas.rows, canvas.width, canvas.origins)
    tokens_AN = (uniform_AS[:, block].double() * count).long().clamp(max=count - 1)
    return torch.where((tokens_AN >= canvas.mask_token_id) & (canvas.mask_token_id >= 0), tokens_AN + 1, tokens_AN)


def _draw(weights_ANV: torch.Tensor, uniform_ANV: torch.Tensor) -> torch.Tensor:
    """[A, N], drawn in proportion to the weights, by the Gumbel-max trick."""
    return (weights_ANV.log() - uniform_ANV.log().neg().log()).argmax(dim=-1)
