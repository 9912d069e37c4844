"""The denoising loop: blocks from left to right, a fixed number of steps each, every step settles its share.

Its parts are independent: `predict` (which logits are a position's, and what the model sees), `commit` (which
proposals are settled), `noise` (where randomness comes from). No cache is kept: every step runs the whole canvas.
"""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.generation.commit import COMMIT_RULES, CommitRule, Step
from dlm_bridge.generation.noise import Noise
from dlm_bridge.generation.predict import Predictor, propose
from dlm_bridge.generation.prompt import Prompt
from dlm_bridge.generation.settings import SamplerSettings


def denoise(model: Any, prompt: Prompt, settings: SamplerSettings, noise: Noise) -> tuple[torch.Tensor, int]:
    """[B, P + new] tokens and the number of forwards. Rows that have ended leave the batch after their block."""
    rule = COMMIT_RULES[settings.remasking]()
    predictor = Predictor(model, prompt, settings)
    batch, prompt_width = prompt.tokens.shape
    width = prompt_width + settings.gen_length
    device = prompt.tokens.device
    canvas_BS = torch.full((batch, width), settings.mask_token_id, device=device)
    canvas_BS[:, :prompt_width] = prompt.tokens
    output_BS = torch.full_like(canvas_BS, settings.pad_token_id)
    active, pads = list(range(batch)), prompt.pads
    eos = torch.tensor(settings.eos_token_ids, dtype=torch.long, device=device)
    quotas = schedule(settings.block_length, settings.steps * settings.block_length // settings.gen_length)

    for start in range(prompt_width, width, settings.block_length):
        block = slice(start, start + settings.block_length)
        for quota in quotas:
            settle(canvas_BS, block, quota, pads, predictor, rule, noise, settings)
        if not settings.eos_token_ids or block.stop == width:
            continue
        ended = torch.isin(canvas_BS[:, prompt_width : block.stop], eos).any(dim=1).tolist()
        if any(ended):
            done = [row for row, end in enumerate(ended) if end]
            on = [row for row, end in enumerate(ended) if not end]
            output_BS[[active[row] for row in done], : block.stop] = canvas_BS[done, : block.stop]
            active, pads = [active[row] for row in on], tuple(pads[row] for row in on)
            canvas_BS = canvas_BS[on]
            predictor.keep(on)
            noise.keep(on)
            if not active:
                break
    output_BS[active] = canvas_BS
    if settings.eos_token_ids:
        output_BS = cut_at_end(output_BS, prompt_width, eos, settings.pad_token_id)
    return output_BS, predictor.forwards


def schedule(masks: int, steps: int) -> list[int]:
    """How many positions each step settles: masks / steps, the remainder one each to the first steps.

    Steps that would settle nothing (there are more steps than masks) are left out: they would change nothing.
    """
    share, remainder = divmod(masks, steps)
    return [share + (step < remainder) for step in range(steps) if share or step < remainder]


def settle(
    canvas_BS: torch.Tensor,
    block: slice,
    quota: int,
    pads: tuple[int, ...],
    predictor: Predictor,
    rule: CommitRule,
    noise: Noise,
    settings: SamplerSettings,
) -> None:
    """One step: predict, propose a token for every position of the block, write those that the rule chooses."""
    logits_BNV = predictor(canvas_BS, block)
    uniform_BNV = noise.per_token(*logits_BNV.shape) if settings.temperature > 0 else None
    tokens_BN = propose(logits_BNV, settings.mask_token_id, settings.temperature, uniform_BNV)
    before_BN = canvas_BS[:, block]
    step = Step(
        logits=logits_BNV,
        tokens=tokens_BN,
        masked=before_BN == settings.mask_token_id,
        quota=quota,
        block=block,
        width=canvas_BS.shape[1],
        pads=pads,
        noise=noise,
    )
    canvas_BS[:, block] = torch.where(rule.select(step), tokens_BN, before_BN)


def cut_at_end(tokens_BS: torch.Tensor, prompt_width: int, eos: torch.Tensor, pad_token_id: int) -> torch.Tensor:
    """Padding from each row's first end-of-sequence token on, and no column that is padding in every row."""
    new_BG = tokens_BS[:, prompt_width:]
    is_end_BG = torch.isin(new_BG, eos)
    after_BG = is_end_BG.long().cumsum(dim=1) - is_end_BG.long() > 0
    length = int((~after_BG).sum(dim=1).max())
    return torch.cat([tokens_BS[:, :prompt_width], new_BG.masked_fill(after_BG, pad_token_id)], dim=1)[
        :, : prompt_width + length
    ]
