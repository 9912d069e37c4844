"""LoRA adapters in the Megatron engine: their weights, initial values, and the run's folder as a checkpoint.

An iteration contains only the adapter and its optimizer state; the base is the run's `model`, on a resume too.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.lora import open_adapter
from dlm_bridge.convert.lora.experts import expert_modules
from dlm_bridge.convert.lora.megatron import ADAPTER_MANIFEST, adapter_manifest
from dlm_bridge.convert.lora.peft import LoraAdapter, LoraFactor, body_names, factor_parameters, plain_config
from dlm_bridge.errors import SettingError, counted
from dlm_bridge.files.atomic import atomic_file, disk_errors
from dlm_bridge.loading.source import MegatronSource
from dlm_bridge.models.initialisation import Normal, initialise
from dlm_bridge.parallel.handover import LiveAdapter
from dlm_bridge.parallel.lora import LiveFactor, add_adapters, live_adapter_tensors
from dlm_bridge.settings import comma_separated
from dlm_bridge.train.checkpoints import how_to_go_on
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.lora import EXPERTS, check_base, fingerprint


@dataclass(frozen=True)
class LoraRun:
    """Adapter of a run."""

    base: Checkpoint
    modules: dict[str, str]  # changed Hub weight -> its module's name in PEFT
    rank: int
    alpha: float
    scale: float
    seed: int
    fingerprint: str | None  # of the base's weights
    start: LoraAdapter | None  # the adapter that training continues
    dora: bool

    @classmethod
    def of(cls, config: TrainConfig, source: MegatronSource, checkpoint: Path | None = None) -> LoraRun | None:
        """Adapter for a configuration from `with_lora`; None if the weights themselves are trained. Raises
        CheckpointError if the adapter to continue, or the `checkpoint` to resume from, has another base, and
        SettingError for targets that do not exist."""
        if not config.model.adapts:
            return None
        base, seed = source.bridge.checkpoint, config.data.seed
        found = _fingerprint(source)
        if checkpoint is not None:
            check_base(checkpoint.parent, found, config.model.model)
        if config.model.adapter is not None:
            check_base(Path(config.model.adapter), found, config.model.model)
            start = open_adapter(Path(config.model.adapter), base)
            facts = start.facts
            return cls(base, facts.modules, facts.rank, facts.alpha, facts.scale, seed, found, start, facts.dora)
        rank, alpha = config.model.lora_rank, config.model.lora_alpha
        assert alpha is not None, "with_lora has set it"
        modules = _modules(base, source.model, comma_separated(config.model.lora_targets))
        return cls(base, modules, rank, alpha, alpha / rank, seed, found, None, config.model.lora_dora)

    def add(self, chunks: list[Any]) -> list[list[LiveFactor]]:
        """Add the adapter to this rank's chunks, which are frozen; returns its factors by chunk. Raises
        SettingError."""
        return add_adapters(chunks, self.base, list(self.modules), self.rank, self.scale, self._initial, self.dora)

    def live(self, factors: list[list[LiveFactor]]) -> LiveAdapter:
        """Trained adapter, from the factors of this rank's chunks. Every process calls this together."""
        return LiveAdapter(
            live_adapter_tensors(self.base, list(self.modules), self.rank, self.dora), factors, self.scale
        )

    def write_manifest(self, root: Path, dtype: torch.dtype) -> None:
        """Write the manifest that identifies a run's checkpoint folder as an adapter's. One process calls it at the
        start of a run."""
        name = self.base.hub.source.get("name")
        config = plain_config(self.rank, self.alpha, self.modules.values(), name, self.dora)
        if self.start is not None:
            config = dict(self.start.facts.config)
        manifest = adapter_manifest(
            self.base,
            self.rank,
            self.alpha,
            self.scale,
            dtype,
            self.modules,
            config,
            fingerprint=self.fingerprint,
        )
        with disk_errors(root, how_to_go_on(None)):
            root.mkdir(parents=True, exist_ok=True)
            with atomic_file(root / ADAPTER_MANIFEST, overwrite=True) as stream:
                stream.write(json.dumps(manifest, indent=1) + "\n")

    def described(self) -> str:
        """Describe the adapter in one line."""
        modules = (module.removesuffix(".base_layer") for module in self.modules.values())
        kinds = sorted({module.rpartition(".")[2] for module in modules})
        numbers = factor_parameters(self.base, self.modules, self.rank, self.dora)
        return (
            f"{'DoRA' if self.dora else 'LoRA'} of rank {self.rank}, alpha {self.alpha:g}, in "
            f"{counted(len(set(self.modules.values())), 'linear layer')} "
            f"({', '.join(kinds)}): {counted(numbers, 'parameter is', 'parameters are')} trained"
        )

    def _initial(self, weight: str, part: LoraFactor) -> torch.Tensor | None:
        """Initial values of a factor. In a new adapter A has PEFT's variance and depends only on (seed, name), B is
        zero, and magnitudes are the base's norms."""
        if self.start is not None:
            return self.start.tensor(weight, part)
        if part == "magnitude":
            return None
        rows, columns = self.base.spec(weight)[1]
        if part == "B":
            return torch.zeros(rows, self.rank)
        return initialise(f"{weight}:lora_A", (self.rank, columns), Normal(1 / math.sqrt(3 * columns)), self.seed)


def _fingerprint(source: MegatronSource) -> str | None:
    """Fingerprint of the base, same as in the Accelerate engine; None if the class has parameters that the Hub does
    not have."""
    base = source.bridge.checkpoint
    hub_names = {body: name for name, body in body_names(base.family, base.param_of).items()}
    try:
        return fingerprint(source.model, lambda name: base.read(hub_names[name]))
    except KeyError:
        return None


def _modules(base: Checkpoint, model: Any, targets: list[str]) -> dict[str, str]:
    """Hub weights of these targets, with their modules' names in PEFT. Raises SettingError."""
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names = [
        name
        for name, param in base.param_of.items()
        if param.layer is not None and param.expert is None and not param.is_mtp
    ]
    modules = {name: body.removesuffix(".weight") for name, body in body_names(base.family, names).items()}
    named = {
        name: module for name, module in modules.items() if module in linear and module.rpartition(".")[2] in targets
    }
    experts = expert_modules(base, partial(body_names, base.family)) if EXPERTS in targets else {}
    found = {*(module.rpartition(".")[2] for module in named.values()), *([EXPERTS] if experts else [])}
    for target in targets:
        if target not in found:
            raise SettingError(
                "lora_targets",
                f"{target} is neither a linear layer of the Megatron model nor {EXPERTS}: unset it, or use "
                "`engine=accelerate`",
            )
    return named | experts
