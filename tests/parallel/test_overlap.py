"""Overlapped communication in the Megatron engine: what is refused, by flag. Equality is in test_megatron.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dlm_bridge.errors import SettingError
from dlm_bridge.train.config import TrainConfig
from tests.interop.cases import BLOCK_ROUTED, PREDICTING, models
from tests.parallel.megatron_cases import Cell, Files
from tests.refusals import refused
from tests.train.conftest import Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
TP = {"tp": 2, "tp_overlap": True, "precision": "bf16"}
EP = {"ep": 2, "ep_overlap": True, "precision": "bf16"}


def configured(**options: Any) -> TrainConfig:
    return TrainConfig.from_flags(**{"engine": "megatron", "model": "m", "data": ["mock"], "output": "o"} | options)


@pytest.mark.parametrize(
    ("options", "field", "named"),
    [
        ({**TP, "tp": 1}, "tp_overlap", "tp"),
        ({**TP, "sequence_parallel": False}, "tp_overlap", "sequence parallelism"),
        ({**TP, "precision": "fp16"}, "tp_overlap", "fp16"),
        ({**TP, "precision": "fp32"}, "tp_overlap", "fp32"),
        ({**TP, "precision": "fp8", "fp8_recipe": "blockwise"}, "tp_overlap", "blockwise"),
        ({**TP, "lora_rank": 2}, "tp_overlap", "lora_rank"),
        ({"tp": 2, "megatron": ["transformer.tp_comm_overlap=true"]}, "megatron", "tp_overlap"),
        ({**EP, "ep": 1}, "ep_overlap", "ep"),
        ({**EP, "pp": 2}, "ep_overlap", "vp"),
        ({**EP, "precision": "fp32"}, "ep_overlap", "precision"),
        ({**EP, "moe_dispatcher": "allgather"}, "ep_overlap", "allgather"),
        ({**EP, "moe_shared_expert_overlap": True}, "ep_overlap", "moe_shared_expert_overlap"),
        ({**EP, "fsdp": "optim_grads_params"}, "ep_overlap", "fsdp"),
        ({**EP, "recompute": "full"}, "ep_overlap", "recompute=full"),
        ({**EP, "recompute": "selective", "recompute_modules": "moe"}, "ep_overlap", "moe"),
        ({**EP, "straggler_interval": 5}, "ep_overlap", "straggler_interval"),
        ({**EP, "lora_rank": 2}, "ep_overlap", "lora_rank"),
        ({"ep": 2, "megatron": ["transformer.overlap_moe_expert_parallel_comm=true"]}, "megatron", "ep_overlap"),
    ],
)
def test_what_options_exclude(options: dict[str, Any], field: str, named: str) -> None:
    from dlm_bridge.parallel.train.settings import check_settings

    with refused(SettingError, field, named):
        check_settings(configured(**options))


@pytest.mark.parametrize("subject", ["masked", "block", "complementary"])
def test_userbuffers_have_a_micro_batchs_tokens(
    subject: str, tmp_path: Path, on_megatron: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which Transformer Engine's products take their sizes from, in evaluations as in steps."""
    from dlm_bridge.parallel import groups
    from dlm_bridge.parallel.train.assembly import assemble, initialize_userbuffers

    made: list[int] = []
    monkeypatch.setattr(groups, "make_userbuffers", lambda tokens, *_, **__: made.append(tokens))
    files = Files(tmp_path).write_some(subject)
    config = TrainConfig.from_flags(**files.options(Cell(subject, False, "one"), micro_batch_size=2))
    trainer = assemble(config, Console(quiet=True))
    objective = trainer.objective
    initialize_userbuffers(config, 8, objective.tokens_read, {"tp_comm_bootstrap_backend": "gloo"})
    batches = [*trainer.produce(1)[0], *trainer.prepare([trainer.evaluation_batch(objective, [0, 1], 1)])]
    assert [batch.input_ids.numel() for batch in batches] == made * 3
    trainer.close()


def test_what_goes_together() -> None:
    configured(**TP | {"precision": "fp8", "fp8_recipe": "tensorwise"})
    configured(**EP | {"pp": 2, "vp": 2, "recompute": "selective", "moe_dispatcher": "auto"})


@pytest.mark.parametrize(
    ("model", "layout", "named"),
    [
        ("deepseek_v3", TP, "latent attention"),
        (BLOCK_ROUTED, EP, "routers"),
        ("llada_moe", EP | {"ep": 8}, "`ep`"),
        (PREDICTING, EP, "`mtp_loss_scaling_factor=0`"),
    ],
)
def test_what_models_exclude(model: str, layout: dict[str, Any], named: str) -> None:
    from dlm_bridge.models.families import find_family
    from dlm_bridge.parallel.train.mcore_config import check_overlap, prediction_fields

    chosen = models()[model]
    family = find_family(chosen.config, chosen.family)
    dims, config = family.mapping.dims(chosen.config), configured(**layout)
    with refused(SettingError, "tp_overlap" if layout is TP else "ep_overlap", named):
        check_overlap(
            config, dims.experts, bool(prediction_fields(config, dims.mtp)), family.mapping.settings(chosen.config)
        )
