"""Do two checkpoints compute the same? Both models on the same random tokens in fp32: what is Megatron's on
megatron-core itself, where it can, and what is the Hub's on transformers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dlm_bridge.bridge import Bridge
from dlm_bridge.convert import megatron_logits
from dlm_bridge.convert.megatron_checkpoint import MegatronCheckpoint
from dlm_bridge.convert.opening import open_any, open_megatron
from dlm_bridge.convert.verify import Difference, LogitsVerdict, Verdict
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.rope import rope_parameters, window_settings

# Absolute, and relative to the largest logit where that is more than one: fp32 keeps no more digits. (32 layers with
# logits up to 40 differ by 4e-5 between two right implementations.)
TOLERANCE = 1e-5
MEGATRON, TRANSFORMERS = "megatron-core", "transformers"
LENGTH = 32  # positions at the least
BEYOND = 8  # positions past a window or the original context
CHEAP_WORK = 2**40  # parameters times positions: seconds to a few minutes on one CPU
CHEAP_SCORES = 2**28  # heads times positions squared: 1 GiB in fp32

PathLike = str | os.PathLike[str]


def check_alone(path: PathLike) -> None:
    """Raise DlmBridgeError unless a checkpoint's logits can be computed in two ways: it is a Megatron one, and
    megatron-core is there and can hold its model."""
    bridge = Bridge(open_any(path))
    if not isinstance(bridge.checkpoint, MegatronCheckpoint):
        raise DlmBridgeError(
            f"{path}: --logits of one checkpoint compares megatron-core with transformers, so it must be a Megatron "
            f"one: name a second checkpoint"
        )
    if reason := megatron_logits.why_not(bridge):
        raise DlmBridgeError(f"{path}: nothing to compare its logits with, name a second checkpoint: {reason}")


def add_logits(verdict: Verdict, a: PathLike, b: PathLike | None = None) -> None:
    """Add the comparison of both models' logits to a verdict; a difference makes it unequal. Without `b`, of
    megatron-core's logits with transformers' of the same Megatron checkpoint (see `check_alone`)."""
    try:
        found = verdict.logits = compare_logits(a, b)
    except DlmBridgeError as error:
        problem = Difference("logits", "unreadable", str(error))
    else:
        if found.difference <= found.allowed:
            return
        problem = Difference(
            "logits", "values", f"they differ by {found.difference:.1e}, allowed are {found.allowed:.1e}"
        )
    verdict.differences.append(problem)
    verdict.equal = False


def compare_logits(a: PathLike, b: PathLike | None = None) -> LogitsVerdict:
    """Both models' logits on the same tokens.

    Raises DlmBridgeError where either is not a whole model, their vocabularies differ or a logit is not finite.
    """
    notes: list[str] = []
    first = _open(a, b, notes)
    second = _Side(first.bridge, TRANSFORMERS) if b is None else _open(b, a, notes)
    if first.vocab != second.vocab:
        raise DlmBridgeError(f"{a} has {first.vocab} tokens, {b} has {second.vocab}")
    length = max(side.length(notes) for side in ([first] if b is None else [first, second]))
    tokens = torch.randint(first.vocab, (1, length), generator=torch.Generator().manual_seed(0))
    device = megatron_logits.device() if MEGATRON in (first.engine, second.engine) else torch.device("cpu")
    one, two = first.logits(tokens, device), second.logits(tokens, device)
    for path, logits in ((a, one), (a if b is None else b, two)):
        if not logits.isfinite().all():
            raise DlmBridgeError(f"{path}: its logits are not finite")
    largest = float(one.abs().max())
    return LogitsVerdict(
        a=first.engine,
        b=second.engine,
        difference=float((one - two).abs().max()),
        allowed=TOLERANCE * max(1.0, largest),
        largest=largest,
        positions=length,
        notes=notes,
    )


def _open(path: PathLike, other: PathLike | None, notes: list[str]) -> _Side:
    """A checkpoint and what computes it; why it is not megatron-core, where it should be, goes to `notes`."""
    try:
        bridge = Bridge(open_any(path))
    except DlmBridgeError:  # a Megatron checkpoint without a manifest: the other names its model
        if other is None:
            raise
        bridge = Bridge(open_megatron(path, like=other))
    if not isinstance(bridge.checkpoint, MegatronCheckpoint):
        return _Side(bridge, TRANSFORMERS)
    if reason := megatron_logits.why_not(bridge):
        notes.append(f"{path}: its logits are {TRANSFORMERS}', not {MEGATRON}'s: {reason}")
        return _Side(bridge, TRANSFORMERS)
    return _Side(bridge, MEGATRON)


@dataclass
class _Side:
    bridge: Bridge
    engine: str  # MEGATRON or TRANSFORMERS

    @property
    def config(self) -> Any:
        """The Hub-side model's configuration object."""
        return self.bridge.family.load("config_class").from_dict(self.bridge.config).get_text_config()

    @property
    def vocab(self) -> int:
        """Rows of the embedding and of the logits; megatron-core has no more of them on one process."""
        return self.bridge.dims.vocab

    def length(self, notes: list[str]) -> int:
        """Positions to compute: two blocks and a half, and more than any window and the original context of a scaled
        RoPE where that is cheap; where it is not, `notes` say so."""
        length = LENGTH
        if self.bridge.family.topology == "block_causal":
            length = max(length, 5 * int(self.config.block_size) // 2)
        window = window_settings(self.bridge.config).get("window_size", (-1, 0))[0] + 1
        context = int(rope_parameters(self.bridge.config).get("original_max_position_embeddings") or 0)
        for name, size in (("sliding window", window), ("original context", context)):
            if size + BEYOND <= length or not size:
                continue
            if self._is_cheap(size + BEYOND):
                length = size + BEYOND
            else:
                notes.append(f"{self.bridge.checkpoint.where}: the {name} of {size} positions was too long to pass")
        return length

    def _is_cheap(self, length: int) -> bool:
        checkpoint, dims = self.bridge.checkpoint, self.bridge.dims
        parameters = sum(prod(checkpoint.spec(name)[1]) for name in checkpoint.link_of)
        return parameters * length <= CHEAP_WORK and dims.heads * length**2 <= CHEAP_SCORES

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
        """[1, S, V] on the CPU. The model is gone on return, so that two never share the memory."""
        if self.engine == MEGATRON:
            return megatron_logits.megatron_logits(self.bridge, tokens)
        model = self.bridge.build_hf_model(dtype=torch.float32, device=device).eval()
        return model(tokens.to(device)).logits.cpu()
