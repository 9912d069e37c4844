"""CUDA graphs of the Megatron engine's layers: the figures and weights of a run without, and what is refused.

The graphs are a stand-in on the CPU (`graph_standin`); megatron-core records and replays as on a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dlm_bridge import Bridge
from dlm_bridge.errors import MissingExtraError, SettingError
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.train.config import TrainConfig
from tests.parallel import graph_standin
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
# Two micro-batches a step, and validations of graphs that steps have made.
RUN: dict[str, Any] = {
    "steps": 4, "micro_batch_size": 4, "length_variation": 0.0, "adam_eps": 1e-3, "eval_interval": 2,
    "save_interval": 0,
}  # fmt: skip
GRAPHS = {"engine": "megatron", "cuda_graphs": True, "length_variation": 0.0}


@pytest.fixture
def graphs(on_megatron: Run) -> Iterator[type[graph_standin.Graph]]:
    """A CPU that has graphs. Groups are made again afterwards, whose generators are other ones."""
    from dlm_bridge.parallel import groups

    groups.destroy()
    with pytest.MonkeyPatch.context() as patch:
        graph_standin.install(patch)
        yield graph_standin.Graph
    groups.destroy()


def test_a_run_is_the_same(
    tmp_path: Path, on_megatron: Run, graphs: type[graph_standin.Graph], seed_folder: Path
) -> None:
    """Twice: what the first run recorded is gone."""
    wanted = on_megatron(tmp_path / "without", **RUN)
    assert graphs.replays == 0
    for name in ("one", "two"):
        found = on_megatron(tmp_path / name, **RUN, cuda_graphs=True)
        assert without_speed(found) == without_speed(wanted)
    # Of the model's two layers the last one computes loss positions only: one is in graphs, in 3 steps of 2
    # micro-batches forward and backward, and in 2 validations forward.
    batches = {"steps": 3 * 2 * 2, "validations": 2 * 1}
    assert graphs.replays >= 2 * sum(batches.values())
    weights = [Bridge.from_megatron(tmp_path / name / "checkpoints") for name in ("without", "one", "two")]
    for name in weights[0].hub_names():
        assert all(torch.equal(each.read(name), weights[0].read(name)) for each in weights[1:]), name


def test_rows_with_a_mask_end_the_run(
    tmp_path: Path, values: dict[str, Any], graphs: type[graph_standin.Graph]
) -> None:
    from dlm_bridge.parallel.train.assembly import assemble

    config = TrainConfig.from_flags(**{**values, **GRAPHS, "output": str(tmp_path / "run")})
    trainer = assemble(config, Console(quiet=True))
    try:
        rows, length = torch.ones(2, config.data.seq_length, dtype=torch.long), config.data.seq_length
        uniforms = Uniforms.keyed(0, 1, range(2), length)
        trainer.prepare([trainer.objective.noise(rows, uniforms)])
        padded = torch.ones_like(rows)
        padded[1, -3:] = 0
        with refused(SettingError, "cuda_graphs"):
            trainer.prepare([trainer.objective.noise(rows, uniforms, attention_mask=padded)])
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pp": 2}, "pp"),
        ({"fsdp": "optim"}, "fsdp"),
        ({"recompute": "full"}, "recompute"),
        ({"precision": "fp8"}, "precision"),
        ({"document_attention": True}, "document_attention"),
        ({"mask_annealing_steps": 10}, "mask_annealing_steps"),
        ({"length_variation": 0.01}, "length_variation"),
        ({"ep": 2, "ep_overlap": True, "precision": "bf16"}, "ep_overlap"),
        ({"megatron": ["transformer.hidden_dropout=0.1"]}, "hidden_dropout"),
        ({"task": "sft"}, "sft"),
    ],
)
def test_what_options_exclude(options: dict[str, Any], named: str) -> None:
    with refused(SettingError, "cuda_graphs", named):
        TrainConfig.from_flags(**{"model": "m", "data": ["mock"], "output": "o"} | GRAPHS | options)


@pytest.mark.parametrize("setting", ["cuda_graph_impl=local", "enable_cuda_graph=true", "cuda_graph_scope=attn"])
def test_megatron_cores_names(setting: str) -> None:
    from dlm_bridge.parallel.train.settings import check_settings

    given = {"megatron": [f"transformer.{setting}"], "engine": "megatron"}
    with refused(SettingError, "megatron", setting.partition("=")[0], "`cuda_graphs`"):
        check_settings(TrainConfig.from_flags(model="m", data=["mock"], output="o", **given))


def test_what_models_and_machines_exclude(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlm_bridge.objectives.single_stream import MaskedDiffusion
    from dlm_bridge.objectives.two_streams import BlockDiffusion
    from dlm_bridge.parallel.train.mcore_config import check_cuda_graphs, check_mcore_config, check_overlap

    monkeypatch.setenv("DLM_BRIDGE_PLATFORM", "cpu")
    config = TrainConfig.from_flags(model="m", data=["mock"], output="o", **GRAPHS)
    with refused(MissingExtraError, "cuda_graphs"):
        check_mcore_config(config)
    with refused(SettingError, "cuda_graphs", "experts"):
        check_overlap(config, 8, False, {})
    with refused(SettingError, "cuda_graphs", "`mtp_loss_scaling_factor=0`"):
        check_overlap(config, 0, True, {})
    one, two = MaskedDiffusion(mask_token_id=0), BlockDiffusion(mask_token_id=0, block_size=4)
    check_cuda_graphs(config, one, "bidirectional")
    check_cuda_graphs(dataclasses.replace(config, engine=type(config.engine)(engine="megatron")), two, "block_causal")
    for objective, pattern in ((two, "bidirectional"), (one, "block_causal")):
        with refused(SettingError, "cuda_graphs"):
            check_cuda_graphs(config, objective, pattern)
