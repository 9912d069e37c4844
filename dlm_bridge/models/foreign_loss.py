"""Refusal of trainers that take a diffusion model for a causal one and compute a next-token loss from its outputs.

transformers' Trainer hands labels to the model, which can refuse them. TRL's trainers (SFT, DPO, GRPO, KTO, RLOO) call
the body and score the next token from its hidden states; with label smoothing both compute the loss from the logits.
The model only sees who calls it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from transformers.utils import logging

from dlm_bridge.errors import DlmBridgeError

logger = logging.get_logger(__name__)

# Packages and modules that may stand between a trainer and the model.
BETWEEN = ("torch", "accelerate", "peft", "deepspeed", "transformers.utils", "dlm_bridge.models")
TRL, TRAINER = "trl", "transformers.trainer"


def needs_noise(name: str) -> str:
    """What a diffusion model without noise answers, whoever asks for its loss."""
    return f"{name} is a diffusion model: its loss needs noise"


def check_body_call(name: str, body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model's body: called by the model itself it passes.

    Raises:
        DlmBridgeError: a trainer wants gradients of a next-token loss.
    """
    if torch.compiler.is_compiling():
        return
    weighted = "loss_weights" in kwargs
    caller = _caller(own=False)
    if caller is None or _is_of(caller, "dlm_bridge"):
        return
    if torch.is_grad_enabled():
        if weighted or _is_of(caller, TRL):
            raise DlmBridgeError(_refusal(name))
        if body.training:
            logger.warning_once(
                f"{needs_noise(name)}. Its body was called for training without the model itself: a next-token loss "
                "of these hidden states is wrong"
            )
    elif _is_of(caller, TRL) and not weighted:
        logger.warning_once(f"{needs_noise(name)}. A next-token loss or likelihood that TRL computes of it is wrong")


def check_call_without_labels(name: str, weighted: bool) -> None:
    """For a forward pass without labels: whether a trainer has kept them to compute a loss from the logits.

    Args:
        name: of the model's class, for messages.
        weighted: the batch has loss weights.

    Raises:
        DlmBridgeError: it has, and that loss is wrong.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if weighted:
        raise DlmBridgeError(_refusal(name))
    caller = _caller(own=True)
    if caller is None or not (_is_of(caller, TRL) or _is_of(caller, TRAINER)):
        return
    if getattr(caller.f_locals.get("self"), "compute_loss_func", None) is None:
        raise DlmBridgeError(_refusal(name))
    logger.warning_once(f"{needs_noise(name)}. Its batches have none, so compute_loss_func must be a diffusion loss")


def _refusal(name: str) -> str:
    return (
        f"{needs_noise(name)}, and this trainer computes a next-token loss itself. Give it DiffusionCollator(..., "
        "for_trl=True) with compute_loss_func=dlm_bridge.train.collator.trl_loss and no label_smoothing_factor; for "
        "rewards or preferences use `dlm-bridge rl`"
    )


def _caller(own: bool) -> FrameType | None:
    """The innermost frame outside this file and outside what stands between; `own`: and outside the model classes."""
    between = BETWEEN if own else BETWEEN[:-1]
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and any(_is_of(frame, name) for name in between):
        frame = frame.f_back
    return frame


def _is_of(frame: FrameType, name: str) -> bool:
    """Whether a frame runs code of a package or a module."""
    module = frame.f_globals.get("__name__") or ""
    return module == name or module.startswith(f"{name}.")
