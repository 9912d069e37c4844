"""Comparison of two checkpoints' logits (`verify --logits`).

Both models compute the same random tokens in fp32: a Megatron checkpoint with megatron-core on one process if it
supports the model, everything else with transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dlm_bridge.bridge import Bridge, PathLike
from dlm_bridge.convert.checkpoints import open_checkpoint, open_megatron
from dlm_bridge.convert.verify import Difference, LogitsVerdict, Verdict
from dlm_bridge.errors import CheckpointError, DlmBridgeError, NonFiniteError, SettingError, counted
from dlm_bridge.models.rope import rope_parameters, window_settings
from dlm_bridge.registration import load

# Absolute, and relative to the largest logit if that is above one: the precision of fp32. (With 32 layers and logits
# up to 40, two correct implementations differ by 4e-5.)
TOLERANCE = 1e-5
MEGATRON, TRANSFORMERS = "megatron-core", "transformers"
CANVAS = 256  # DiffusionGemma's canvas length if config.json has none
LENGTH = 32  # minimum number of positions
BEYOND = 8  # positions past a window or the original context
CHEAP_WORK = 2**40  # parameters times positions: seconds to a few minutes on one CPU
CHEAP_SCORES = 2**28  # heads times positions squared: 1 GiB in fp32


def check_alone(path: PathLike) -> None:
    """Raise SettingError unless a checkpoint's logits can be computed in two ways: it is a Megatron checkpoint, and
    megatron-core is installed and supports its model."""
    bridge = Bridge(open_checkpoint(path))
    reason = "not a Megatron checkpoint" if bridge.checkpoint.iteration is None else unsupported_reason(bridge)
    if reason:
        raise SettingError("logits", f"megatron-core cannot compute {path} ({reason}): name a second checkpoint")


def add_logits(verdict: Verdict, a: PathLike, b: PathLike | None = None) -> None:
    """Add the comparison of both models' logits to a verdict; a difference makes it unequal.

    Without `b`, the logits of megatron-core and transformers for the same Megatron checkpoint are compared (see
    `check_alone`).
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
    """Compare both models' logits on the same tokens.

    Raises:
        CheckpointError: a checkpoint is not a whole model, or the vocabularies differ.
        NonFiniteError: a logit is NaN or infinite.
    """
    notes: list[str] = []
    first = _open(a, b, notes)
    second = _Computed(first.bridge, TRANSFORMERS) if b is None else _open(b, a, notes)
    if first.vocab != second.vocab:
        raise CheckpointError(b, f"has {second.vocab} tokens, {a} has {first.vocab}")
    length = max(side.length(notes) for side in ([first] if b is None else [first, second]))
    tokens = torch.randint(first.vocab, (1, length), generator=torch.Generator().manual_seed(0))
    device = torch.device("cpu")
    if MEGATRON in (first.engine, second.engine):
        device = load("engines", "megatron")().device()
    one, two = first.logits(tokens, device), second.logits(tokens, device)
    for path, logits in ((a, one), (a if b is None else b, two)):
        if not logits.isfinite().all():
            raise NonFiniteError(rows=[str(path)])
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
    """Open a checkpoint with the engine that computes it. Appends to `notes` the reason why megatron-core does not
    compute a Megatron checkpoint."""
    try:
        bridge = Bridge(open_checkpoint(path))
    except DlmBridgeError:  # a Megatron checkpoint without a manifest: the other one identifies the model
        if other is None:
            raise
        bridge = Bridge(open_megatron(path, like=other))
    if bridge.checkpoint.iteration is None:
        return _Computed(bridge, TRANSFORMERS)
    if reason := unsupported_reason(bridge):
        notes.append(f"{path}: computed by {TRANSFORMERS}, not {MEGATRON}: {reason}")
        return _Computed(bridge, TRANSFORMERS)
    return _Computed(bridge, MEGATRON)


@dataclass
class _Computed:
    """Checkpoint whose logits are computed by `engine`."""

    bridge: Bridge
    engine: str  # MEGATRON or TRANSFORMERS

    @property
    def config(self) -> Any:
        """Configuration object of the Hub model."""
        return self.bridge.family.load("config_class").from_dict(self.bridge.config).get_text_config()

    @property
    def vocab(self) -> int:
        """Vocabulary size of the embedding and the logits, which megatron-core does not pad on one process."""
        return self.bridge.dims.vocab

    @property
    def canvas(self) -> int:
        return canvas_length(self.bridge)

    @property
    def _text(self) -> dict[str, Any]:
        """Section of config.json for the text tower; empty without one."""
        found: dict[str, Any] = self.bridge.config.get("text_config") or {}
        return found

    def length(self, notes: list[str]) -> int:
        """Number of positions: at least two and a half blocks, and, unless expensive, more than a sliding window and a
        scaled RoPE's original context. Appends to `notes` what was not tested."""
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
                notes.append(
                    f"{self.bridge.checkpoint.where}: the {name} of {counted(size, 'position')} was not exceeded"
                )
        return length

    def _is_cheap(self, length: int) -> bool:
        checkpoint, dims = self.bridge.checkpoint, self.bridge.dims
        parameters = sum(prod(checkpoint.spec(name)[1]) for name in checkpoint.param_of)
        return parameters * length <= CHEAP_WORK and dims.heads * length**2 <= CHEAP_SCORES

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Logits on the CPU, as of `model_logits`. The model is freed on return, so that only one is in memory."""
        if self.engine == MEGATRON:
            return load("engines", "megatron")().logits(self.bridge, tokens)
        model = self.bridge.build_hf_model(dtype=torch.float32, device=device).eval()
        return model_logits(model, tokens.to(device), self.canvas).cpu()


def canvas_length(bridge: Bridge) -> int:
    """Number of tokens of the canvas that follows a prompt; 0 for models without one."""
    if not (bridge.family.native and bridge.family.kind == "diffusion"):
        return 0
    return int(bridge.config.get("canvas_length") or CANVAS)


def model_logits(model: Any, tokens: torch.Tensor, canvas: int) -> torch.Tensor:
    """[1, S, V] logits of a model of transformers; for a canvas, the last `canvas` tokens, those of its second step,
    conditioned on the first step's logits."""
    if not canvas:
        found: torch.Tensor = model(tokens).logits
        return found
    prompt, draft = tokens[:, :-canvas], tokens[:, -canvas:]
    first = model(prompt, decoder_input_ids=draft).logits
    found = model(prompt, decoder_input_ids=draft, self_conditioning_logits=first).logits
    return found


def unsupported_reason(bridge: Bridge) -> str | None:
    """Reason why megatron-core cannot compute a model (not installed, or not supported); None if it can."""
    try:
        load("engines", "megatron")().check_logits(bridge)
    except DlmBridgeError as error:
        return str(error)
    return None
