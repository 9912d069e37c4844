"""Main params that the precision-aware optimizer leaves to Transformer Engine's Adam, here a stand-in of it:
they begin with the source's fp32, and checkpoints hold them whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dlm_bridge import Bridge
from dlm_bridge.errors import SettingError
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.mcore_patches.optimizers import (
    inner_main_params,
    joined,
    keeps_inner_main_params,
    patch_offloading_resume,
    read_main_param,
    remainder,
)
from dlm_bridge.train.config import TrainConfig
from tests.convert.helpers import common_state
from tests.interop.cases import PREDICTING, models
from tests.parallel import offloading, precision_aware
from tests.refusals import refused
from tests.train.conftest import Run

AWARE = "optimizer.use_precision_aware_optimizer=true"
WHOLE = "optimizer.store_param_remainders=false"


def test_what_a_bf16_weight_lacks_of_its_main_param() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    values = torch.cat([values, values * 1e-39, -values, torch.tensor([0.0, -0.0, 3e38, 1.0, -1.0])])
    halfway = torch.tensor([0x3F818000, 0x3F808000], dtype=torch.int32)  # which round up and down, to what is even
    words = torch.cat([values.view(torch.int32), halfway])
    half = words.view(torch.float32).bfloat16()
    off = words - joined(half, remainder(words.view(torch.float32), half)).view(torch.int32)
    assert off[-2:].tolist() == [0, 1]
    assert not off[(words & 0xFFFF) != 0x8000].any()


@pytest.mark.parametrize("settings", [[AWARE], [AWARE, WHOLE]], ids=["remainders", "whole"])
def test_main_params_begin_with_the_sources_fp32(
    settings: list[str], tmp_path: Path, bf16_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlm_bridge import Layout
    from dlm_bridge.parallel.train import trainer as trainer_module

    started = []
    monkeypatch.setattr(trainer_module.MegatronTrainer, "run", lambda trainer, _: started.append(trainer))
    bf16_run(tmp_path / "run", megatron=settings)
    (trainer,) = started
    (exact,) = trainer.source.bridge.build_megatron_model(Layout(), "fp32")
    names = {parameter: name for name, parameter in trainer.chunks[0].module.named_parameters()}
    wanted, rounded = dict(exact.named_parameters()), 0
    for part in trainer.optimizer.chained_optimizers:
        assert keeps_inner_main_params(part)
        for parameter, share in inner_main_params(part):
            main_param = read_main_param(part.optimizer, share)
            away = main_param.view(torch.int32) - wanted[names[parameter]].flatten().view(torch.int32)
            assert away.abs().max() <= 1
            assert (away != 0).float().mean() < 1e-3  # what is halfway between two bf16 numbers
            rounded += int((main_param != share).sum())
    assert rounded > 1000


@pytest.mark.parametrize(
    ("settings", "resumes"),
    [pytest.param([AWARE], ("to", "on", "from"), marks=pytest.mark.slow), ([AWARE, WHOLE], ("on",))],
    ids=["remainders", "whole"],
)
def test_checkpoints_hold_main_params_whole(
    settings: list[str], resumes: tuple[str, ...], tmp_path: Path, bf16_run: Run
) -> None:
    """A run is stopped and resumed with the settings, or changes to them, or from them."""
    plain = bf16_run(tmp_path / "plain", steps=4)
    aware = bf16_run(tmp_path / "aware", steps=4, megatron=settings)
    wanted = _figures(plain)
    assert _figures(aware) == pytest.approx(wanted, rel=1e-3)
    for name in resumes:
        first, then = {"to": ([], settings), "on": (settings, settings), "from": (settings, [])}[name]
        bf16_run(tmp_path / name, steps=2, megatron=first)
        resumed = bf16_run(tmp_path / name, resume=True, steps=4, megatron=then)
        assert _figures(resumed) == pytest.approx(wanted, rel=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "changes"),
    [
        pytest.param("param", {}, id="sharded"),
        pytest.param("param", {"megatron": [AWARE]}, id="aware", marks=pytest.mark.slow),
        pytest.param("fp32_param", {"distributed_optimizer": False}, id="unsharded"),
        pytest.param("fp32_param", {"optimizer": "sgd"}, id="sgd", marks=pytest.mark.slow),
    ],
)
def test_main_params_beside_parameters_in_fp32_have_their_own_names(
    prefix: str, changes: dict[str, Any], tmp_path: Path, bf16_run: Run
) -> None:
    """Routers in fp32: megatron-core mistakes their places for those of others, or counts on there being none."""
    models()[PREDICTING].write(tmp_path / "hub")
    options = {"model": str(tmp_path / "hub"), "from_scratch": False, "data": ["mock"], **changes}
    whole = bf16_run(tmp_path / "whole", steps=4, **options)
    bf16_run(tmp_path / "run", steps=2, **options)
    reader = dcp.FileSystemReader(str(tmp_path / "run/checkpoints/iter_0000002"))
    known = {
        key: torch.zeros(found.size, dtype=found.properties.dtype)
        for key, found in reader.read_metadata().state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    dcp.load(known, storage_reader=reader)
    prefix = f"optimizer.state.{prefix}."
    main_params = {key.removeprefix(prefix): known[key] for key in known if key.startswith(prefix)}
    assert {known[name].dtype for name in main_params} == {torch.bfloat16, torch.float32}
    for name, main_param in main_params.items():
        assert torch.allclose(main_param, known[name].float(), rtol=2**-7, atol=0), name
    resumed = bf16_run(tmp_path / "run", resume=True, steps=4, **options)
    assert _figures(resumed) == pytest.approx(_figures(whole), rel=1e-3)


def _figures(rows: list[dict[str, Any]]) -> list[float]:
    return [row[key] for row in rows for key in ("loss", "grad_norm")]


@pytest.mark.parametrize(
    "changes",
    [{"megatron": ["optimizer.use_precision_aware_optimizer=false"]}, {"distributed_optimizer": False}],
)
def test_what_an_offloaded_optimizer_cannot_be(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from dlm_bridge.parallel.train.mcore_config import optimizer_config

    precision_aware.install(monkeypatch)
    monkeypatch.setattr(platform, "current", lambda: SimpleNamespace(name="cuda"))
    options = {"model": "m", "data": ["mock"], "output": "o", "engine": "megatron", "precision": "bf16"}
    options["optimizer_cpu_offload"] = True
    assert optimizer_config(TrainConfig.from_flags(**options)).use_precision_aware_optimizer
    with refused(SettingError, "optimizer_cpu_offload"):
        optimizer_config(TrainConfig.from_flags(**options, **changes))


def test_weights_in_fp32_are_not_offloaded(tmp_path: Path, bf16_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    models()[PREDICTING].write(tmp_path / "hub")
    options = {"model": str(tmp_path / "hub"), "from_scratch": False, "data": ["mock"]}
    offloading.install(monkeypatch)
    with pytest.raises(ValueError, match="non-leaf"):  # what megatron-core says
        bf16_run(tmp_path / "run", **options)
    monkeypatch.setattr(platform.current(), "name", "of a GPU", raising=False)
    with refused(SettingError, "optimizer_cpu_offload", "router.weight"):
        bf16_run(tmp_path / "run", **options, optimizer_cpu_offload=True)
    with refused(SettingError, "optimizer_cpu_offload", "fp32"):
        bf16_run(tmp_path / "run", precision="fp32", optimizer_cpu_offload=True)


def test_an_offloading_optimizer_takes_the_main_params_of_fp32_parameters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's own, of which nothing is on a GPU: it is loaded as by a resume."""
    from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: SimpleNamespace(wait=lambda _: None))
    cuda = SimpleNamespace(current_stream=lambda: stream)
    monkeypatch.setattr(hybrid_optimizer, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    parameters = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    inner = hybrid_optimizer.HybridDeviceOptimizer(
        [{"params": parameters}],
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
    )
    main_params = [torch.arange(4.0) / 3, torch.arange(4.0) / 7]
    inner.state = {
        parameter: {"step": torch.tensor(1.0), "exp_avg": zeros, "exp_avg_sq": zeros, "master_param": main_param}
        for parameter, main_param, zeros in zip(parameters, main_params, torch.zeros(2, 4), strict=True)
    }
    with pytest.raises(KeyError):
        inner._sync_hdo_state_to_sub_optimizers()
    patch_offloading_resume(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)]))
    inner._sync_hdo_state_to_sub_optimizers()
    for parameter, main_param in zip(parameters, main_params, strict=True):
        assert torch.equal(inner.param_to_inner_param[parameter], main_param)


def test_an_offloaded_run_resumes_and_its_checkpoints_hold_no_classes(
    tmp_path: Path, bf16_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloading.install(monkeypatch)
    whole = bf16_run(tmp_path / "whole", steps=4)
    bf16_run(tmp_path / "run", steps=2)
    saved = tmp_path / "run" / "checkpoints"
    common = common_state(saved / "iter_0000002")
    assert [group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]] == [2, 2]
    resumed = bf16_run(tmp_path / "run", resume=True, steps=4)
    assert _figures(resumed) == pytest.approx(_figures(whole), rel=1e-6)
    Bridge.from_megatron(saved).to_hf(tmp_path / "exported")
