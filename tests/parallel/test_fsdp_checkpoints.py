"""Megatron FSDP's checkpoints on CPU: the rows of one or two data parallel ranks of a live model, saved, loaded by
another number of ranks and exported. FSDP itself needs GPUs: here its parameters are stood in for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.manifest import digests_of, file_names, write_digests
from dlm_bridge.convert.verify import verify_manifest
from dlm_bridge.errors import DlmBridgeError, LayoutError, SettingError
from dlm_bridge.parallel.mcore_compat import IS_0_16
from dlm_bridge.parallel.weights import is_vocabulary, live_tensors
from tests.convert.helpers import hub_tensors, same
from tests.families import llada, llada_moe
from tests.families.case import FamilyCase
from tests.interop.cases import PREDICTING, models
from tests.parallel import delayed_scaling
from tests.refusals import refused
from tests.train.test_damaged_checkpoints import lose

pytestmark = pytest.mark.usefixtures("world_of_one")


class Rank:
    """What FSDP's wrapper and its optimizer show of one of several data parallel ranks: rows of each parameter."""

    def __init__(self, model: Any, rank: int, ranks: int, fill: float | None = None) -> None:
        named, state = [], {}
        for name, parameter in model.named_parameters():
            rows = len(parameter)
            first, last = rows * rank // ranks, rows * (rank + 1) // ranks
            values = parameter.detach()[first:last].clone()
            if fill is not None:
                values.fill_(fill)
            row = parameter[0].numel() if parameter.dim() > 1 else 1
            held = SimpleNamespace(
                orig_param=parameter, megatron_fsdp_slice=slice(first * row, last * row), _local_tensor=values
            )
            key = Key(held)
            named.append((name, key))
            if len(values):
                state[key] = {"exp_avg": values * 2, "exp_avg_sq": values * 3}
        self.named, self.installed = named, False
        inner = SimpleNamespace(state=state, param_groups=[{"step": 5 if fill is None else 1}])
        self.optimizer = SimpleNamespace(optimizer=inner, _init_optimizer_states_with_dummy_values=lambda: None)
        self.config = model.config
        self.param_and_grad_buffer = SimpleNamespace(optimizer_named_parameters=named)
        self.module = SimpleNamespace(install_optimized_model_weights=self._install, module=model)

    def start_param_sync(self) -> None:
        assert self.installed

    def _install(self) -> None:
        self.installed = True


class Key:
    """A parameter, which the optimizer's state is keyed by."""

    def __init__(self, held: SimpleNamespace) -> None:
        self.__dict__.update(vars(held))


@pytest.mark.parametrize(
    "name", ["gqa", "llada2_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llada_moe", PREDICTING))]
)
@pytest.mark.fast("llada2_moe")
def test_rows_come_back_on_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    from dlm_bridge.parallel.train import checkpoints
    from dlm_bridge.parallel.train.checkpoints import read_mtp_shard

    hub, folder = tmp_path / "hub", tmp_path / "iter_0000007"
    models()[name].write(hub)
    bridge = Bridge.from_hf(hub)
    (model,) = bridge.build_megatron_model(Layout())
    whole = Rank(model, 0, 1)
    share = read_mtp_shard(bridge.checkpoint)
    checkpoints.save_fsdp(folder, 7, {"train_blocks": 3}, whole, whole.optimizer, share)

    for rank in range(3):
        wanted, found = Rank(model, rank, 3), Rank(model, rank, 3, fill=-1.0)
        assert checkpoints.load_fsdp(folder, found, found.optimizer) == {"train_blocks": 3}
        assert found.optimizer.optimizer.param_groups[0]["step"] == 5
        for (key, mine), (_, other) in zip(found.named, wanted.named, strict=True):
            assert torch.equal(mine._local_tensor, other._local_tensor), key
            for kind in ("exp_avg", "exp_avg_sq"):
                if len(mine._local_tensor):
                    loaded = found.optimizer.optimizer.state[mine][kind]
                    assert torch.equal(loaded, wanted.optimizer.optimizer.state[other][kind]), (key, kind)

    Bridge.from_megatron(folder, like=hub).to_hf(tmp_path / "out")
    exported = hub_tensors(tmp_path / "out")
    assert exported.keys() == hub_tensors(hub).keys()
    assert all(same(tensor, hub_tensors(hub)[key]) for key, tensor in exported.items())


def test_a_lost_file_is_found(tmp_path: Path) -> None:
    from dlm_bridge.parallel.train import checkpoints

    models()["gqa"].write(tmp_path / "hub")
    (model,) = Bridge.from_hf(tmp_path / "hub").build_megatron_model(Layout())
    whole, folder = Rank(model, 0, 1), tmp_path / "iter_0000007"
    checkpoints.save_fsdp(folder, 7, {}, whole, whole.optimizer, {})
    write_digests(folder, digests_of(folder, file_names(folder)))
    assert verify_manifest(folder).equal
    file = next(folder.glob("*.distcp"))
    lose(file, folder)
    assert [found.name for found in verify_manifest(folder).differences] == [file.name]


def mark_tensor_parallel(part: Any, axis: int | None) -> None:
    """Set the attributes with which megatron-core's FSDP says how tensor parallel ranks shard a parameter, or that
    they replicate it."""
    if IS_0_16:
        part._mcore_tp, part._tp_partition_dim, part._tp_duplicated = True, axis or 0, axis is None
    else:
        part._tensor_parallel_mode = {None: "replicated", 0: "column", 1: "row"}[axis]


class TensorParallelPart:
    """What a model is on rank `rank` of `ranks` of tensor parallelism: each parameter's part, by the mapping. `rows`
    is the size of the padded vocabulary."""

    def __init__(self, bridge: Bridge, model: Any, rank: int, ranks: int, rows: int) -> None:
        self.config, self.named_modules = model.config, model.named_modules
        params = {param.megatron_name: param for param in bridge.checkpoint.params}
        names = {id(tensor): name for name, tensor in live_tensors([model]).items()}
        self._named = []
        for name, parameter in model.named_parameters():
            param, whole = params[names[id(parameter)]], parameter.detach()
            if is_vocabulary(param):
                whole = torch.nn.functional.pad(whole, (0, 0, 0, rows - len(whole))).chunk(ranks)[rank]
            elif param.rule.tp_axis is not None:
                whole = param.shard(whole, rank, ranks)
            part = torch.nn.Parameter(whole.clone())
            if ranks > 1:
                mark_tensor_parallel(part, param.rule.tp_axis)
            self._named.append((name, part))

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return self._named


@pytest.mark.parametrize(
    ("case", "stored", "ranks"),
    [
        pytest.param(llada.CASES[0], 131, 2, id="dense, to 2"),
        pytest.param(llada.CASES[0], 132, 1, id="dense, to 1", marks=pytest.mark.slow),
        pytest.param(llada_moe.CASE, 131, 2, id="experts, to 2", marks=pytest.mark.slow),
    ],
)
def test_weights_and_moments_come_back_at_another_tensor_parallel_size(
    case: FamilyCase, stored: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a vocabulary of 131 tokens, which a tensor parallel size of two pads to 132 rows."""
    from dlm_bridge.parallel.mcore_patches import fsdp
    from dlm_bridge.parallel.train import checkpoints

    case.write(tmp_path / "hub", vocab_size=131, embedding_size=131)
    bridge, folder = Bridge.from_hf(tmp_path / "hub"), tmp_path / "iter_0000007"
    (model,) = bridge.build_megatron_model(Layout())
    saved = Rank(TensorParallelPart(bridge, model, 0, 1, stored), 0, 1)
    checkpoints.save_fsdp(folder, 7, {"train_blocks": 3}, saved, saved.optimizer, {})
    for rank in range(ranks):
        for prefix in ("get_tensor_model_parallel", "get_expert_tensor_parallel"):
            monkeypatch.setattr(fsdp.parallel_state, f"{prefix}_rank", lambda rank=rank: rank)
            monkeypatch.setattr(fsdp.parallel_state, f"{prefix}_world_size", lambda: ranks)
        for replica in range(2):
            own = TensorParallelPart(bridge, model, rank, ranks, 131 if ranks == 1 else 132)
            wanted, found = Rank(own, replica, 2), Rank(own, replica, 2, fill=-1.0)
            assert checkpoints.load_fsdp(folder, found, found.optimizer) == {"train_blocks": 3}
            for (key, mine), (_, other) in zip(found.named, wanted.named, strict=True):
                assert torch.equal(mine._local_tensor, other._local_tensor), (rank, replica, key)
                for kind, moments in wanted.optimizer.optimizer.state.get(other, {}).items():
                    assert torch.equal(found.optimizer.optimizer.state[mine][kind], moments), (key, kind)


def test_what_is_no_checkpoint_of_megatron_fsdp_is_refused(tmp_path: Path) -> None:
    from dlm_bridge.parallel.train import checkpoints
    from dlm_bridge.train.config import TrainConfig

    models()["gqa"].write(tmp_path / "hub")
    (model,) = Bridge.from_hf(tmp_path / "hub").build_megatron_model(Layout())
    rank = Rank(model, 0, 1)
    folder = tmp_path / "iter_0000007"
    checkpoints.save_fsdp(folder, 7, {}, rank, rank.optimizer, {})
    asked = {"model": "m", "data": ["mock"], "output": "o", "engine": "megatron"}
    for tp in (1, 2):
        checkpoints.check_resumable(folder, TrainConfig.from_flags(**asked, fsdp="optim", tp=tp))
    with refused(SettingError, "fsdp", str(folder)):
        checkpoints.check_resumable(folder, TrainConfig.from_flags(**asked))
    (folder / ".metadata").write_bytes(b"torn")
    with pytest.raises(DlmBridgeError, match=r"iter_0000007/.metadata"):
        checkpoints.check_resumable(folder, TrainConfig.from_flags(**asked, fsdp="optim"))


def test_halves_of_tensor_parallel_ranks_lie_apart() -> None:
    """Gate and up of rank 1 of 2; a data parallel rank has the last row of gate and the two of up."""
    from dlm_bridge.parallel.mcore_patches.fsdp import FSDPShard
    from dlm_bridge.parallel.train.checkpoints import tensor_boxes

    rows = torch.arange(6.0).view(3, 2)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    held = FSDPShard(name, None, start=1, rows=3, part=(4, 2), axis=0, rank=1, ranks=2)
    found = dict(tensor_boxes(held, name, rows))
    assert {key: (piece.offsets, piece.shape) for key, piece in found.items()} == {
        f"{name}_w": ((3, 0), (4, 2)),
        f"{name}_v": ((2, 0), (4, 2)),
    }
    assert torch.equal(found[f"{name}_w"].tensor, rows[:1])
    assert torch.equal(found[f"{name}_v"].tensor, rows[1:])
    projection = FSDPShard("linear_proj.weight", None, start=1, rows=3, part=(4, 2), axis=1, rank=1, ranks=2)
    ((_, piece),) = tensor_boxes(projection, projection.name, rows)
    assert (piece.offsets, piece.shape) == ((1, 2), (4, 4))


@pytest.mark.parametrize("name", ["gqa", "llada_moe"])
@pytest.mark.fast("gqa")
def test_scales_of_fp8_come_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    from dlm_bridge.parallel.train import checkpoints, fp8_state

    hub, folder, made = tmp_path / "hub", tmp_path / "iter_0000007", []
    models()[name].write(hub)
    bridge = Bridge.from_hf(hub)
    (model,) = bridge.build_megatron_model(Layout())
    delayed_scaling.install(monkeypatch)
    delayed_scaling.scale_outputs(monkeypatch, RowParallelLinear, made)
    monkeypatch.setattr(fp8_state, "_recipe", lambda _: delayed_scaling.TEDelayedScaling())
    rank = Rank(model, 0, 1)
    for module in model.modules():
        if isinstance(module, RowParallelLinear):
            module.get_extra_state()
            made[-1].tensors["scale_fwd"].fill_(len(made))
    saved = [scaled.tensors["scale_fwd"].clone() for scaled in made]
    checkpoints.save_fsdp(folder, 7, {"train_blocks": 3}, rank, rank.optimizer, {})
    for scaled in made:
        scaled.tensors["scale_fwd"].zero_()
    with fp8_state.rewritten_extra_states():
        checkpoints.load_fsdp(folder, rank, rank.optimizer)
    assert len(saved) > 3
    for scaled, wanted in zip(made, saved, strict=True):
        assert torch.equal(scaled.tensors["scale_fwd"], wanted)
    Bridge.from_megatron(folder, like=hub).to_hf(tmp_path / "out")
    assert all(same(tensor, hub_tensors(hub)[key]) for key, tensor in hub_tensors(tmp_path / "out").items())
    if name == "llada_moe":
        monkeypatch.setattr(checkpoints.parallel_state, "get_expert_model_parallel_world_size", lambda: 2)
        with fp8_state.rewritten_extra_states(), refused(LayoutError, "ep", "1", str(folder)):
            checkpoints.load_fsdp(folder, rank, rank.optimizer)
