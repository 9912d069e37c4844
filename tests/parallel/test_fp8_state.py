"""FP8's scales and histories come back from a checkpoint, and nothing else does."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge
from dlm_bridge.errors import CheckpointError
from dlm_bridge.parallel import mcore_compat
from dlm_bridge.parallel.mcore_patches import modules
from dlm_bridge.parallel.train import fp8_state
from tests.convert.test_bad_megatron_input import Exploit
from tests.parallel import delayed_scaling
from tests.parallel.delayed_scaling import Scaled, TEDelayedScaling
from tests.refusals import refused
from tests.train.conftest import Run

KEY = "decoder.layers.0.mlp.linear_fc2._extra_state"


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    delayed_scaling.install(monkeypatch)
    monkeypatch.setattr(fp8_state, "_recipe", lambda _: TEDelayedScaling())


def scaled(gemms: int = 1, recipe: Any = None) -> Scaled:
    made = Scaled(gemms, recipe)
    generator = torch.Generator().manual_seed(0)
    for tensor in made.tensors.values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return made


def in_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def restored(state: torch.Tensor, gemms: int = 1) -> Scaled:
    """What a module has after loading it as a resume does."""
    module = Scaled(gemms)
    with fp8_state.rewritten_extra_states():
        module.set_extra_state(fp8_state.rewrite_extra_states({KEY: state}, None)[KEY])
    return module


def test_scales_come_back(delayed: None) -> None:
    saved = scaled(gemms=2)
    with pytest.raises(RuntimeError, match="Refusing to load"):
        Scaled(2).set_extra_state(saved.get_extra_state())
    found = restored(saved.get_extra_state(), gemms=2)
    assert found.variables == saved.variables
    for name, tensor in saved.tensors.items():
        assert torch.equal(found.tensors[name], tensor)
    assert "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE" not in os.environ


def test_scales_that_megatron_core_0_19_has_pickled_come_back(delayed: None) -> None:
    """It replaces torch's function, which every tensor's pickle names, in the whole process."""
    saved = scaled()
    pickled = pickle.dumps({"recipe": saved.recipe, **saved.tensors, "extra_fp8_variables": saved.variables}, 2)
    for name in (b"ctorch.storage\n_load_from_bytes\n", b"cmegatron.core.safe_globals\nsafe_load_from_bytes\n"):
        assert b"load_from_bytes\n" in pickled
        pickled = re.sub(rb"c[\w.]+\n\w*_load_from_bytes\n", name, pickled)
        found = restored(torch.frombuffer(bytearray(pickled), dtype=torch.uint8))
        assert all(torch.equal(found.tensors[key], tensor) for key, tensor in saved.tensors.items())


def test_the_parts_of_grouped_experts_are_views(delayed: None) -> None:
    """megatron-core cuts a layer's state into its experts', as columns of the whole."""
    whole = scaled(gemms=4)
    part = Scaled()
    part.tensors = {
        "scale_fwd": whole.tensors["scale_fwd"].view(3, -1)[:, 2],
        "amax_history_fwd": whole.tensors["amax_history_fwd"].view(4, 3, -1)[:, :, 2],
        "scale_bwd": whole.tensors["scale_bwd"].view(2, -1)[:, 2],
        "amax_history_bwd": whole.tensors["amax_history_bwd"].view(4, 2, -1)[:, :, 2],
    }
    state = fp8_state.rewrite_extra_states({f"{KEY}2": part.get_extra_state()}, None)
    found = pickle.loads(state[f"{KEY}2"].numpy().tobytes())
    for name, tensor in part.tensors.items():
        assert torch.equal(found[name], tensor)


@pytest.mark.skipif(not mcore_compat.IS_0_16, reason="megatron-core 0.19 saves them itself")
def test_grouped_experts_without_scales_are_saved() -> None:
    class Experts(torch.nn.Module):
        """Of megatron-core's, whose state says nothing."""

        num_gemms = 3

        def _split_extra_state(self, state: torch.Tensor) -> list[torch.Tensor]:
            return [pickle.loads(state.numpy().tobytes())["recipe"]] * 3

    model = torch.nn.Sequential(Experts())
    modules.patch_grouped_linear_state([model])
    empty = torch.empty(0, dtype=torch.uint8)
    assert model[0]._split_extra_state(empty) == [empty] * 3
    assert model[0]._split_extra_state(in_bytes({"recipe": 1})) == [1] * 3


@pytest.mark.parametrize("steps", [2, 6])
def test_a_history_takes_the_length_of_the_runs_recipe(steps: int, delayed: None) -> None:
    saved = scaled(recipe=TEDelayedScaling(steps))
    found = restored(saved.get_extra_state()).tensors["amax_history_fwd"]
    wanted = torch.zeros(4, 3)
    wanted[:steps] = saved.tensors["amax_history_fwd"][:4]
    assert torch.equal(found, wanted)


def test_what_keeps_no_scales_is_left_empty(delayed: None) -> None:
    for state in (torch.empty(0, dtype=torch.uint8), in_bytes({}), in_bytes({"recipe": TEDelayedScaling()})):
        assert fp8_state.rewrite_extra_states({KEY: state}, None)[KEY].numel() == 0
    assert fp8_state.rewrite_extra_states({KEY: None, "weight": 1}, None) == {KEY: None, "weight": 1}


def test_a_run_without_delayed_scaling_takes_none() -> None:
    state = fp8_state.rewrite_extra_states({KEY: scaled().get_extra_state()}, SimpleNamespace(fp8=None))
    assert state[KEY].numel() == 0


def _state(**changes: Any) -> torch.Tensor:
    made = scaled()
    return in_bytes({"recipe": made.recipe, **made.tensors, "extra_fp8_variables": made.variables, **changes})


def test_nothing_of_a_pickle_runs(delayed: None, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    storage = torch.ones(3).untyped_storage()

    class Nested:
        """What a tensor's pickle loads is a pickle too, which torch would load without a look."""

        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (pickle.dumps(Exploit(marker)),)

    hostile = [
        (_state(recipe=Exploit(marker)), "posix.system"),
        (_state(scale_fwd=Nested()), "posix.system"),
        (in_bytes(Exploit(marker)), "posix.system"),
        (_state(scale_fwd=storage), "torch.storage.UntypedStorage"),
        (_state(scale_fwd=torch.ones(3, dtype=torch.float64)), "torch.DoubleStorage"),
        (_state(scale_fwd=torch.ones(2)), "[4, 3]"),
        (_state(scale_fwd=torch.ones(1).expand(3)), "[3]"),
        (_state(extra_fp8_variables={"num_gemms": 10**9}), "num_gemms"),
        (scaled().get_extra_state()[:-40], ""),
        (torch.ones(4), "Tensor"),
    ]
    for state, named in hostile:
        with refused(CheckpointError, KEY, named) as error:
            fp8_state.rewrite_extra_states({KEY: state}, None)
        assert "\n" not in str(error.value)
    assert not marker.exists()


def test_a_resumed_run_scales_as_the_uninterrupted_one(
    tmp_path: Path,
    delayed: None,
    bf16_run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    made: list[Scaled] = []
    delayed_scaling.scale_outputs(monkeypatch, RowParallelLinear, made)
    whole = bf16_run(tmp_path / "whole", steps=4)
    bf16_run(tmp_path / "run", steps=2)
    made.clear()
    resumed = bf16_run(tmp_path / "run", resume=True, steps=4)
    assert [row["loss"] for row in resumed] == pytest.approx([row["loss"] for row in whole], rel=1e-6)
    assert len(made) > 2
    Bridge.from_megatron(tmp_path / "run" / "checkpoints").to_hf(tmp_path / "exported")

    bf16_run(tmp_path / "hostile", steps=2)
    marker = tmp_path / "marker"
    monkeypatch.setattr(Scaled, "get_extra_state", lambda _: in_bytes({"recipe": Exploit(marker)}))
    bf16_run(tmp_path / "hostile", resume=True, steps=3)
    with refused(CheckpointError, tmp_path / "hostile/checkpoints/iter_0000003", "_extra_state", "posix.system"):
        bf16_run(tmp_path / "hostile", resume=True, steps=4)
    monkeypatch.setattr(Scaled, "get_extra_state", lambda _: Exploit(marker))
    bf16_run(tmp_path / "objects", steps=2)
    with refused(CheckpointError, tmp_path / "objects/checkpoints/iter_0000002"):
        bf16_run(tmp_path / "objects", resume=True, steps=4)
    assert not marker.exists()
