"""Comparison of two checkpoints' logits (`verify --logits`).

Both models compute the same random tokens in fp32: a Megatron checkpoint with megatron-core on one process where it
can hold the model, everything else with transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dlm_bridge.bridge import Bridge, PathLike
from dlm_bridge.convert.checkpoints import open_checkpoint, open_megatron
from dlm_bridge.convert.verify import Difference, LogitsVerdict, Verdict
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.rope import rope_parameters, window_settings
from dlm_bridge.registration import load

# Absolute, and relative to the largest logit where that is above one: the precision of fp32. (With 32 layers and
# logits up to 40, two correct implementations differ by 4e-5.)
TOLERANCE = 1e-5
MEGATRON, TRANSFORMERS = "megatron-core", "transformers"
CANVAS = 256  # DiffusionGemma's, where config.json leaves it out
LENGTH = 32  # minimum number of positions
BEYOND = 8  # positions past a window or the original context
CHEAP_WORK = 2**40  # parameters times positions: seconds to a few minutes on one CPU
CHEAP_SCORES = 2**28  # heads times positions squared: 1 GiB in fp32


def check_alone(path: PathLike) -> None:
    """Raise DlmBridgeError unless a checkpoint's logits can be computed in two ways: it is a Megatron checkpoint, and
    megatron-core is installed and supports its model."""
    bridge = Bridge(open_checkpoint(path))
    if bridge.checkpoint.iteration is None:
        raise DlmBridgeError(
            f"{path}: --logits of one checkpoint compares megatron-core with transformers, so it must be a Megatron "
            f"one: name a second checkpoint"
        )
    if reason := unsupported_reason(bridge):
        raise DlmBridgeError(f"{path}: nothing to compare its logits with, name a second checkpoint: {reason}")


def add_logits(verdict: Verdict, a: PathLike, b: PathLike | None = None) -> None:
    """Add the comparison of both models' logits to a verdict; a difference makes it unequal.

    Without `b`, megatron-core's logits are compared with transformers' of the same Megatron checkpoint
    (see `check_alone`).
    """
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
    second = _Computed(first.bridge, TRANSFORMERS) if b is None else _open(b, a, notes)
    if first.vocab != second.vocab:
        raise DlmBridgeError(f"{a} has {first.vocab} tokens, {b} has {second.vocab}")
    length = max(side.length(notes) for side in ([first] if b is None else [first, second]))
    tokens = torch.randint(first.vocab, (1, length), generator=torch.Generator().manual_seed(0))
    device = torch.device("cpu")
    if MEGATRON in (first.engine, second.engine):
        device = load("engines", "megatron")().device()
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


def _open(path: PathLike, other: PathLike | None, notes: list[str]) -> _Computed:
    """A checkpoint with the engine that computes it; `notes` says why a Megatron one is not on megatron-core."""
    try:
        bridge = Bridge(open_checkpoint(path))
    except DlmBridgeError:  # a Megatron checkpoint without a manifest: the other names its model
        if other is None:
            raise
        bridge = Bridge(open_megatron(path, like=other))
    if bridge.checkpoint.iteration is None:
        return _Computed(bridge, TRANSFORMERS)
    if reason := unsupported_reason(bridge):
        notes.append(f"{path}: its logits are {TRANSFORMERS}', not {MEGATRON}'s: {reason}")
        return _Computed(bridge, TRANSFORMERS)
    return _Computed(bridge, MEGATRON)


@dataclass
class _Computed:
    """A checkpoint whose logits are computed by `engine`."""

    bridge: Bridge
    engine: str  # MEGATRON or TRANSFORMERS

    @property
    def config(self) -> Any:
        """The Hub-side model's configuration object."""
        return self.bridge.family.load("config_class").from_dict(self.bridge.config).get_text_config()

    @property
    def vocab(self) -> int:
        """Rows of the embedding and of the logits; on one process megatron-core does not pad them."""
        return self.bridge.dims.vocab

    @property
    def canvas(self) -> int:
        """Tokens of the canvas that follows a prompt where a model has one, else 0."""
        if not (self.bridge.family.native and self.bridge.family.kind == "diffusion"):
            return 0
        return int(self.bridge.config.get("canvas_length") or CANVAS)

    @property
    def _text(self) -> dict[str, Any]:
        """The text tower's section of config.json, where it has one."""
        found: dict[str, Any] = self.bridge.config.get("text_config") or {}
        return found

    def length(self, notes: list[str]) -> int:
        """Number of positions: two and a half blocks, and more than a sliding window and than a scaled RoPE's original
        context, unless that is expensive, which `notes` says."""
        length = LENGTH + self.canvas
        if self.canvas:
            notes.append(f"{self.bridge.checkpoint.where}: the vision tower was not run")
        elif self.bridge.family.attention_pattern == "block_causal":
            length = max(length, 5 * int(self.config.block_size) // 2)
        window = window_settings({**self.bridge.config, **self._text}).get("window_size", (-1, 0))[0] + 1
        window += self.canvas if window else 0
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
        parameters = sum(prod(checkpoint.spec(name)[1]) for name in checkpoint.param_of)
        return parameters * length <= CHEAP_WORK and dims.heads * length**2 <= CHEAP_SCORES

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
        """[1, S, V] on the CPU, of a canvas after its second step, which is conditioned on the first one's logits.

        The model is freed on return, so that only one is in memory.
        """
        if self.engine == MEGATRON:
            return load("engines", "megatron")().logits(self.bridge, tokens)
        model = self.bridge.build_hf_model(dtype=torch.float32, device=device).eval()
        tokens = tokens.to(device)
        if not self.canvas:
            return model(tokens).logits.cpu()
        prompt, canvas = tokens[:, : -self.canvas], tokens[:, -self.canvas :]
        first = model(prompt, decoder_input_ids=canvas).logits
        return model(prompt, decoder_input_ids=canvas, self_conditioning_logits=first).logits.cpu()


def unsupported_reason(bridge: Bridge) -> str | None:
    """Why megatron-core cannot compute this model here (not installed, or no such model); None where it can."""
    try:
        load("engines", "megatron")().check_logits(bridge)
    except DlmBridgeError as error:
        return str(error)
    return None
