"""Megatron engine as registered with the core; its methods import megatron-core when they are called."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dlm_bridge.registration import deferred
from dlm_bridge.train.engine import TrainingEngine


class MegatronEngine(TrainingEngine):
    """Training on megatron-core, live models (`Bridge.build_megatron_model`) and their logits (`verify` with
    `logits`)."""

    train = deferred("dlm_bridge.parallel.train.assembly:train")
    find_checkpoint = deferred("dlm_bridge.parallel.train.checkpoints:find_checkpoint")
    check_settings = deferred("dlm_bridge.parallel.train.settings:check_settings")
    check_model = deferred("dlm_bridge.parallel.train.mcore_config:check_model")

    build_model = deferred("dlm_bridge.parallel.parallelize:build_megatron_model")
    refresh_hf_model = deferred("dlm_bridge.parallel.handover:refresh_hf_model")
    stream_hf_weights = deferred("dlm_bridge.parallel.handover:stream_hf_weights")

    check_logits = deferred("dlm_bridge.parallel.logits:check_logits")
    logits = deferred("dlm_bridge.parallel.logits:logits")

    def device(self) -> Any:
        """Device of this process, on which logits are computed."""
        from dlm_bridge.parallel import platform

        return platform.current().device()

    def environment(self) -> dict[str, Any]:
        from dlm_bridge.attention import flash_attention
        from dlm_bridge.parallel import mcore_patches, platform
        from dlm_bridge.parallel.overrides import SUPPORTED, is_supported

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
                "made_for": list(SUPPORTED),
                "fits": is_supported(megatron),
                "names": sorted(mcore_patches.overrides_of(chosen, megatron)),
            },
            "patches": [
                {
                    "target": patch.target,
                    "what": patch.what,
                    "why": patch.why,
                    "source": f"megatron/core/{patch.cited(megatron)}",
                    "versions": list(patch.versions),
                    "when": patch.when.words,
                    "active": patch.applies(chosen, megatron),
                }
                for patch in mcore_patches.PATCHES
                if megatron
            ],
        }
