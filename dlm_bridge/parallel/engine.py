"""The Megatron engine as the core finds it by `registration.load`: what is imported depends on what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_bridge.train.engine import Engine

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from transformers import PreTrainedModel

    from dlm_bridge.bridge import Bridge
    from dlm_bridge.convert.checkpoint import Checkpoint
    from dlm_bridge.mapping.layout import Layout
    from dlm_bridge.mapping.rules import Dims
    from dlm_bridge.models.families import FamilySpec
    from dlm_bridge.objectives.base import Objective
    from dlm_bridge.train.checkpoints import ResumePoint
    from dlm_bridge.train.config import TrainConfig


class MegatronEngine(Engine):
    """Training on megatron-core; beside it live models (`Bridge.build_megatron_model`) and their logits."""

    def train(self, config: TrainConfig, resume: bool = False, console: Console | None = None) -> Path:
        from dlm_bridge.parallel.train.assembly import train

        return train(config, resume, console)

    def find_checkpoint(self, config: TrainConfig) -> ResumePoint:
        from dlm_bridge.parallel.train.checkpoints import find_checkpoint

        return find_checkpoint(config)

    def check_settings(self, config: TrainConfig) -> list[str]:
        from dlm_bridge.parallel.train.settings import check_settings

        return check_settings(config)

    def check_model(
        self,
        config: TrainConfig,
        family: FamilySpec,
        hub_config: dict[str, Any],
        dims: Dims,
        objective: Objective | None,
    ) -> None:
        from dlm_bridge.parallel.train.mcore_config import check_model

        check_model(config, family, hub_config, dims, objective)

    def environment(self) -> dict[str, Any]:
        from dlm_bridge.attention import flash_attention
        from dlm_bridge.parallel import mcore_patches, platform
        from dlm_bridge.parallel.overrides import SUPPORTED

        chosen = platform.current()
        try:
            megatron = version("megatron-core")
        except PackageNotFoundError:
            megatron = None
        return {
            "platform": {
                "chosen": chosen.name,
                "backend": chosen.backend,
                "available": {
                    name: {"class": f"{kind.__module__}.{kind.__qualname__}", "available": kind.available()}
                    for name, kind in platform.known().items()
                },
                "transformer_engine": chosen.uses_transformer_engine(),
                "flash_attention": flash_attention.missing() is None,
            },
            "devices": {
                "count": chosen.device_count(),
                "name": chosen.device_name(),
                "memory_bytes": chosen.total_memory(),
            },
            "overrides": None
            if megatron is None
            else {
                "made_for": SUPPORTED,
                "fits": megatron == SUPPORTED,
                "names": sorted(mcore_patches.overrides_of(chosen)),
            },
            "patches": [
                {
                    "target": patch.target,
                    "what": patch.what,
                    "why": patch.why,
                    "source": f"megatron/core/{patch.source}",
                    "when": patch.when.words,
                    "active": patch.when.met(chosen),
                }
                for patch in mcore_patches.PATCHES
                if megatron
            ],
        }

    # -- live models, of `Bridge` and `verify --logits`

    def build_model(
        self, checkpoint: Checkpoint, layout: Layout, dtype: str | torch.dtype | None = None, **overrides: Any
    ) -> list[Any]:
        from dlm_bridge.parallel.parallelize import build_megatron_model

        return build_megatron_model(checkpoint, layout, dtype, **overrides)

    def refresh_hf_model(self, checkpoint: Checkpoint, hf_model: PreTrainedModel, model: Any) -> None:
        from dlm_bridge.parallel.handover import refresh_hf_model

        refresh_hf_model(checkpoint, hf_model, model)

    def stream_hf_weights(self, checkpoint: Checkpoint, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        from dlm_bridge.parallel.handover import stream_hf_weights

        return stream_hf_weights(checkpoint, model)

    def device(self) -> torch.device:
        from dlm_bridge.parallel import platform

        return platform.current().device()

    def check_logits(self, bridge: Bridge) -> None:
        from dlm_bridge.parallel.logits import check_logits

        check_logits(bridge)

    def logits(self, bridge: Bridge, tokens_BS: torch.Tensor) -> torch.Tensor:
        from dlm_bridge.parallel.logits import logits

        return logits(bridge, tokens_BS)
