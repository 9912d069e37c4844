"""LLaDA's published sampler in plain, slow steps: what `generate` has to equal, token for token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def sample(
    model: Any,
    prompts: torch.Tensor,
    *,
    mask: int,
    steps: int,
    gen_length: int,
    block_length: int,
    cfg_scale: float = 0.0,
    draw: Callable[[int, int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Greedy sampling of unpadded prompts [B, P]; with random remasking `draw` gives each step's [B, S] numbers."""
    batch, width = prompts.shape[0], prompts.shape[1] + gen_length
    canvas = torch.cat([prompts, torch.full((batch, gen_length), mask)], dim=1)
    blocks = gen_length // block_length
    for number in range(blocks):
        begin = prompts.shape[1] + number * block_length
        end = begin + block_length
        waiting = [int((canvas[row, begin:end] == mask).sum()) for row in range(batch)]
        for step in range(steps // blocks):
            logits = guided_logits(model, canvas, prompts.shape[1], mask, cfg_scale)
            scores = None if draw is None else draw(batch, width)
            for row in range(batch):
                # Spread the row's masks over the steps; what does not divide goes to the first ones.
                share = waiting[row] // (steps // blocks) + (step < waiting[row] % (steps // blocks))
                choice = logits[row].argmax(-1)
                if scores is None:
                    confidence = logits[row].softmax(-1)[torch.arange(width), choice]
                else:
                    confidence = scores[row].clone()
                for position in range(width):
                    if position >= end or canvas[row, position] != mask:
                        confidence[position] = float("-inf")
                for position in confidence.sort(descending=True, stable=True).indices[:share].tolist():
                    canvas[row, position] = choice[position]
    return canvas


def guided_logits(model: Any, canvas: torch.Tensor, prompt: int, mask: int, cfg_scale: float) -> torch.Tensor:
    """[B, S, V]; the unconditional half of the batch does not see the prompt."""
    with torch.no_grad():
        if cfg_scale == 0:
            return model(canvas).logits
        unconditional = canvas.clone()
        unconditional[:, :prompt] = mask
        seen, unseen = model(torch.cat([canvas, unconditional])).logits.split(len(canvas))
        return unseen + (cfg_scale + 1) * (seen - unseen)
