"""Adapters that act at mask tokens only: I-DLM's gated LoRA (arXiv 2604.11035), for lossless decoding.

All other tokens have the base model's hidden states, keys and values, so that the base model itself verifies a draft.
As in the authors' server (thuEcstasy/I-DLM 3342a17, `conditional_lora` of SGLang's `IDLMBlockN`), the output of factor
A is zeroed at all other tokens.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.hub import ADAPTER_CONFIG, read_config

KEY = "mask_only_token_id"  # key in adapter_config.json, whose value is the mask token's id


def mask_only_token(folder: Path) -> int | None:
    """Mask token id of an adapter that acts at mask tokens only, by its adapter_config.json; None for other adapters.

    Raises:
        CheckpointError: the value is not a token id.
    """
    token = read_config(folder / ADAPTER_CONFIG).get(KEY)
    if token is not None and (type(token) is not int or token < 0):
        raise CheckpointError(folder / ADAPTER_CONFIG, f"{KEY} must be the mask token's id, not {token!r}")
    return token


def record_mask_only(folder: Path, token: int) -> None:
    """Add the mask token's id to PEFT's adapter_config.json."""
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), KEY: token}, indent=2) + "\n")


@contextlib.contextmanager
def key_is_known() -> Iterator[None]:
    """Context manager that suppresses PEFT's warning of the unknown key."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf"Unexpected keyword arguments \['{KEY}'\]")
        yield


def restrict_to_masks(model: Any, token: int) -> None:
    """Register hooks that restrict a PEFT model's LoRA to the mask token.

    Raises:
        CheckpointError: the token is not in the vocabulary.
    """
    embedding = model.get_input_embeddings()
    if token >= embedding.num_embeddings:
        raise CheckpointError(KEY, f"{token} is outside the vocabulary of {embedding.num_embeddings}")
    gate = MaskGate(token)
    embedding.register_forward_hook(gate.read_tokens)
    for module in model.modules():
        factors = getattr(module, "lora_A", {})
        for factor in factors.values():
            factor.register_forward_hook(gate.zero_other_tokens)
        if factors:
            module.mask_gate = gate


class MaskGate:
    """Hooks that share the positions of masks in a forward pass."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.masks: torch.Tensor | None = None  # [B, S] bool

    def read_tokens(self, embedding: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        self.masks = args[0] == self.token

    def zero_other_tokens(self, factor: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if self.masks is None:
            raise SettingError("inputs_embeds", f"an adapter with {KEY} needs token ids: pass `input_ids`")
        return output * self.masks[..., None]
