"""Adapters that act at mask tokens alone: I-DLM's gated LoRA (arXiv 2604.11035), for lossless decoding.

Every other token has the base's own hidden states, keys and values, so that what checks a draft is the base itself. As
in the authors' server (thuEcstasy/I-DLM 3342a17, `conditional_lora` of SGLang's `IDLMBlockN`), what factor A gives is
zero at all other tokens.
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

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.hub import ADAPTER_CONFIG, read_config

KEY = "mask_only_token_id"  # in adapter_config.json: the mask token's id; without it an adapter acts at every token


def mask_only_token(folder: Path) -> int | None:
    """The mask token of an adapter that acts there alone, by its adapter_config.json; None of any other adapter.
    Raises DlmBridgeError for what is not a token."""
    token = read_config(folder / ADAPTER_CONFIG).get(KEY)
    if token is not None and (type(token) is not int or token < 0):
        raise DlmBridgeError(f"{folder / ADAPTER_CONFIG}: {KEY} {token!r} is not a token: give the mask token's id")
    return token


def record_mask_only(folder: Path, token: int) -> None:
    """Add the key to the adapter_config.json that PEFT has written."""
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), KEY: token}, indent=2) + "\n")


@contextlib.contextmanager
def key_is_known() -> Iterator[None]:
    """PEFT warns of keys that it does not know; not of this one here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf"Unexpected keyword arguments \['{KEY}'\]")
        yield


def restrict_to_masks(model: Any, token: int) -> None:
    """Let the LoRA factors of a PEFT model act at the mask token alone, from now on. Raises DlmBridgeError for a token
    beyond the vocabulary."""
    embedding = model.get_input_embeddings()
    if token >= embedding.num_embeddings:
        raise DlmBridgeError(f"{KEY} {token} is outside the vocabulary of {embedding.num_embeddings}")
    gate = _Gate(token)
    embedding.register_forward_hook(gate.read_tokens)
    for module in model.modules():
        for factor in getattr(module, "lora_A", {}).values():
            factor.register_forward_hook(gate.zero_other_tokens)


class _Gate:
    """Where the masks of a forward pass are."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.masks: torch.Tensor | None = None  # [B, S] bool

    def read_tokens(self, embedding: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        self.masks = args[0] == self.token

    def zero_other_tokens(self, factor: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if self.masks is None:
            raise DlmBridgeError(f"an adapter with {KEY} needs tokens: pass input_ids, not inputs_embeds")
        return output * self.masks[..., None]
