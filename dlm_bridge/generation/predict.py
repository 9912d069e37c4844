"""One forward of the model over the canvas: each row as if it were alone, with or without guidance."""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.generation.prompt import Prompt
from dlm_bridge.generation.settings import SamplerSettings


class Predictor:
    """Turns a canvas into logits for the positions of a block (same-position prediction: logits[i] are token i's)."""

    def __init__(self, model: Any, prompt: Prompt, settings: SamplerSettings) -> None:
        self.forwards = 0
        self._model = model
        self._cfg_scale = settings.cfg_scale
        self._mask_token_id = settings.mask_token_id
        self._prompt_width = prompt.tokens.shape[1]
        device = prompt.tokens.device
        self._attention_mask_BS: torch.Tensor | None = None
        self._position_ids_BS: torch.Tensor | None = None
        # Unpadded rows run without a mask: the same numbers, by the faster kernel.
        if any(prompt.pads):
            columns_S = torch.arange(self._prompt_width + settings.gen_length, device=device)
            positions_BS = columns_S - torch.tensor(prompt.pads, device=device)[:, None]
            self._attention_mask_BS = (positions_BS >= 0).long()
            self._position_ids_BS = positions_BS.clamp(min=0)

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows of the current batch only."""
        if self._attention_mask_BS is not None and self._position_ids_BS is not None:
            self._attention_mask_BS = self._attention_mask_BS[rows]
            self._position_ids_BS = self._position_ids_BS[rows]

    def __call__(self, canvas_BS: torch.Tensor, block: slice) -> torch.Tensor:
        """Logits [B, N, V] of the block's positions, in the model's dtype."""
        self.forwards += 1
        if not self._cfg_scale:
            return self._logits(canvas_BS, block, copies=1)
        unconditional_BS = canvas_BS.clone()
        unconditional_BS[:, : self._prompt_width] = self._mask_token_id
        both = self._logits(torch.cat([canvas_BS, unconditional_BS]), block, copies=2)
        logits_BNV, unconditional_BNV = both.chunk(2)
        return unconditional_BNV + (self._cfg_scale + 1) * (logits_BNV - unconditional_BNV)

    def _logits(self, canvas_BS: torch.Tensor, block: slice, copies: int) -> torch.Tensor:
        output = self._model(
            input_ids=canvas_BS,
            attention_mask=_repeat(self._attention_mask_BS, copies),
            position_ids=_repeat(self._position_ids_BS, copies),
            logits_to_keep=block,  # the output layer runs on the block alone; a slice costs no device sync
        )
        return output.logits.to(canvas_BS.device)


def _repeat(tensor_BS: torch.Tensor | None, copies: int) -> torch.Tensor | None:
    return tensor_BS if tensor_BS is None or copies == 1 else tensor_BS.repeat(copies, 1)


def propose(
    logits_BNV: torch.Tensor, mask_token_id: int, temperature: float, uniform_BNV: torch.Tensor | None
) -> torch.Tensor:
    """[B, N] tokens, never the mask token: the best ones, or draws from softmax(logits / temperature).

    Drawn by the Gumbel-max trick in float64, as lower precision cuts the noise's tail off and so skews the draws
    (arXiv 2409.02908); argmax of logits - T * log(-log u) is that of exp(logits) / (-log u)^T without its overflow.
    """
    if uniform_BNV is None:
        scores_BNV = logits_BNV.clone()
    else:
        gumbel_BNV = uniform_BNV.log_().neg_().log_()
        scores_BNV = logits_BNV.to(torch.float64) - temperature * gumbel_BNV
    scores_BNV[..., mask_token_id] = -torch.inf
    return scores_BNV.argmax(dim=-1)
