"""Checks in two processes: each function runs on both ranks at once, in the order of `cases.plan`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dlm_bridge import Bridge, Layout
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.parallel import groups, mcore_patches, overrides, platform
from dlm_bridge.parallel.attention import attention_mask, block_size
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.handover import refresh_hf_model, stream_hf_weights
from dlm_bridge.parallel.parallelize import build_megatron_model
from dlm_bridge.parallel.weights import live_tensors
from tests.groups import make_way
from tests.interop import engine
from tests.interop.cases import LAYOUTS, SEED, Files, models

ROUTER_BIAS = ("expert_bias", "e_score_correction_bias")
TOLERANCE = {"atol": 1e-5, "rtol": 0.0}


def _build(files: Files, model: str, layout: str, **overrides: Any) -> tuple[Bridge, list[Any]]:
    """Build a model. Process groups of the same layout are reused, as in a run that builds a second model."""
    make_way(LAYOUTS[layout])
    bridge = Bridge.from_hf(files.hub(model), family=models()[model].family)
    return bridge, build_megatron_model(bridge.checkpoint, LAYOUTS[layout], **overrides)


def _run(
    bridge: Bridge, chunks: list[Any], model: str, input_ids: torch.Tensor | None = None, backward: bool = False
) -> torch.Tensor:
    """Logits of the model's tokens, or of `input_ids`, under the family's mask."""
    case = models()[model]
    positions = torch.arange(case.length)[None]
    mask = attention_mask(bridge.family.attention_pattern, positions, block_size(bridge.checkpoint))
    ids = case.tokens() if input_ids is None else input_ids
    return engine.run(chunks, ids, case.vocab, case.logit_weights() if backward else None, mask)


def _reference(files: Files, model: str) -> dict[str, Any]:
    return torch.load(files.reference(model), weights_only=True)


def _source(model: str) -> dict[str, torch.Tensor]:
    return models()[model].tensors()


def _assert_same_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def platform_is_reversible(files: Files) -> None:
    cpu = mcore_patches.overrides_of(platform.current())
    untouched = torch.cuda.current_device, torch.cuda.synchronize
    overrides.install(cpu, "a test")
    installed = torch.cuda.current_device
    overrides.install(cpu, "a test")
    assert torch.cuda.current_device is installed
    assert torch.cuda.current_device() == torch.device("cpu")
    overrides.uninstall()
    assert (torch.cuda.current_device, torch.cuda.synchronize) == untouched


def one_process_without_torchrun(files: Files) -> None:
    """Each process is temporarily a world of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name)
        with engine.refused("multiple of 4", "1 run"):
            groups.initialize(Layout(tp=2, pp=2))
        bridge = Bridge.from_hf(files.hub("gqa"))
        chunks = build_megatron_model(bridge.checkpoint, Layout())
        assert dist.get_world_size() == 1
        logits = _run(bridge, chunks, "gqa")
        torch.testing.assert_close(logits, _reference(files, "gqa")["logits"], **TOLERANCE)
        _assert_same_tensors(dict(stream_hf_weights(bridge.checkpoint, chunks)), _source("gqa"))
        groups.destroy()
        dist.destroy_process_group()


def built_logits_match(files: Files, model: str, layout: str, **overrides: Any) -> None:
    bridge, chunks = _build(files, model, layout, **overrides)
    logits = _run(bridge, chunks, model)
    torch.testing.assert_close(logits, _reference(files, model)["logits"], **TOLERANCE)


def last_token_moves_first_logit(files: Files, layout: str) -> None:
    bridge, chunks = _build(files, "gqa", layout)
    input_ids = models()["gqa"].tokens()
    before = _run(bridge, chunks, "gqa", input_ids)
    input_ids[:, -1] = (input_ids[:, -1] + 1) % 128
    after = _run(bridge, chunks, "gqa", input_ids)
    assert ((after - before)[:, 0].abs().amax(-1) > 1e-3).all()


def gradients_match(files: Files, model: str, layout: str, **overrides: Any) -> None:
    bridge, chunks = _build(files, model, layout, **overrides)
    _run(bridge, chunks, model, backward=True)
    engine.finalize_gradients(chunks)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.grad
    wanted = _reference(files, model)["gradients"]
    found = dict(stream_hf_weights(bridge.checkpoint, chunks))
    # A router's bias has no gradient: it affects only the choice of experts.
    assert found.keys() - wanted.keys() == {name for name in found if name.endswith(ROUTER_BIAS)}
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=0, msg=name)


def imported_checkpoint_loads_strictly(files: Files, model: str, layout: str) -> None:
    """Load a checkpoint of another layout into a model with other weights."""
    bridge, chunks = _build(files, model, layout)
    with torch.no_grad():
        for tensor in live_tensors(chunks).values():
            tensor.fill_(7)
    engine.load(chunks, files.imported(model, layout))
    logits = _run(bridge, chunks, model)
    torch.testing.assert_close(logits, _reference(files, model)["logits"], **TOLERANCE)
    _assert_same_tensors(dict(stream_hf_weights(bridge.checkpoint, chunks)), _source(model))


def megatron_saves(files: Files, model: str, layout: str) -> None:
    """Save a checkpoint, which the parent process exports and compares."""
    _, chunks = _build(files, model, layout)
    engine.save(chunks, files.saved(model, layout))


def streamed_weights_are_the_source(files: Files, model: str, layout: str) -> None:
    bridge, chunks = _build(files, model, layout)
    _assert_same_tensors(dict(stream_hf_weights(bridge.checkpoint, chunks)), _source(model))
    aliases = {parameter.data_ptr() for chunk in chunks for parameter in chunk.parameters()}
    assert not any(tensor.data_ptr() in aliases for _, tensor in stream_hf_weights(bridge.checkpoint, chunks))


def more_padding_is_trimmed_by_role(files: Files) -> None:
    """Pad the vocabulary to a larger multiple, as other launchers do, so that ranks have other rows."""
    bridge, chunks = _build(files, "odd_vocabulary", "tp2")
    rows, rank = 80, dist.get_rank()  # 80 + 45 of 125, and 35 rows of padding
    parameters = dict(chunks[0].named_parameters())
    for name, hub_name in (("embedding.word_embeddings", "wte"), ("output_layer", "ff_out")):
        whole = torch.full((2 * rows, 64), 9.0)
        whole[:125] = _source("odd_vocabulary")[f"model.transformer.{hub_name}.weight"]
        parameters[f"{name}.weight"].data = whole[rank * rows : (rank + 1) * rows].clone()
    _assert_same_tensors(dict(stream_hf_weights(bridge.checkpoint, chunks)), _source("odd_vocabulary"))


def wrapped_models_are_unwrapped(files: Files) -> None:
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("bf16"))
    (chunk,) = build_megatron_model(bridge.checkpoint, Layout(tp=2))
    wrapped = DistributedDataParallel(
        chunk.config, DistributedDataParallelConfig(), Float16Module(chunk.config, chunk)
    )
    wanted = {name: tensor.bfloat16() for name, tensor in _source("gqa").items()}
    _assert_same_tensors(dict(stream_hf_weights(bridge.checkpoint, [wrapped])), wanted)
    _assert_same_tensors(dict(stream_hf_weights(bridge.checkpoint, wrapped)), wanted)


def each_stage_reads_its_own_tensors(files: Files) -> None:
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("gqa"))
    names: list[str] = []

    def recorded(param: ParamMapping) -> tuple[torch.Tensor, ...]:
        names.extend(param.hub_names)
        return type(bridge.checkpoint).read_param(bridge.checkpoint, param)

    bridge.checkpoint.read_param = recorded
    build_megatron_model(bridge.checkpoint, Layout(pp=2))
    assert len(set(names)) == len(names)
    read: list[Any] = [None, None]
    dist.all_gather_object(read, set(names))
    assert not read[0] & read[1]
    assert read[0] | read[1] == set(_source("gqa"))


def each_rank_reads_its_own_experts(files: Files) -> None:
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("mixtral"))
    read: set[int] = set()

    def recorded(param: ParamMapping) -> tuple[torch.Tensor, ...]:
        read.update(() if param.expert is None else (param.expert,))
        return type(bridge.checkpoint).read_param(bridge.checkpoint, param)

    bridge.checkpoint.read_param = recorded
    build_megatron_model(bridge.checkpoint, Layout(ep=2))
    assert read == (set(range(4)) if dist.get_rank() == 0 else set(range(4, 8)))


def half_precision_is_kept(files: Files) -> None:
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("bf16"))
    chunks = build_megatron_model(bridge.checkpoint, Layout(tp=2))
    assert {parameter.dtype for parameter in chunks[0].parameters()} == {torch.bfloat16}
    streamed = dict(stream_hf_weights(bridge.checkpoint, chunks))
    _assert_same_tensors(streamed, {name: tensor.bfloat16() for name, tensor in _source("gqa").items()})
    groups.destroy()
    chunks = build_megatron_model(bridge.checkpoint, Layout(tp=2), dtype=torch.float32)
    assert {parameter.dtype for parameter in chunks[0].parameters()} == {torch.float32}
    streamed = dict(stream_hf_weights(bridge.checkpoint, chunks))
    _assert_same_tensors(streamed, {name: tensor.bfloat16().float() for name, tensor in _source("gqa").items()})


def mixed_dtypes_need_a_choice(files: Files) -> None:
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("mixed"))
    with engine.refused("wte.weight", "bfloat16", "ln_f.weight", "float32"):
        build_megatron_model(bridge.checkpoint, Layout(tp=2))


def a_router_keeps_its_own_dtype(files: Files) -> None:
    """A router stays fp32 in a bf16 checkpoint, also after a cast."""
    source = models()["llada2_moe"]
    wanted = source.build(source.config, SEED, torch.bfloat16)
    assert {tensor.dtype for tensor in wanted.values()} == {torch.bfloat16, torch.float32}
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("router"))
    _assert_same_tensors(
        dict(stream_hf_weights(bridge.checkpoint, build_megatron_model(bridge.checkpoint, Layout(ep=2)))), wanted
    )
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("llada2_moe"))
    chunks = build_megatron_model(bridge.checkpoint, Layout(ep=2), dtype="bf16")
    wanted = {name: tensor.to(wanted[name].dtype) for name, tensor in _source("llada2_moe").items()}
    _assert_same_tensors(dict(stream_hf_weights(bridge.checkpoint, chunks)), wanted)


def changed_weights_refresh_the_hub_model(files: Files, model: str, layout: str) -> None:
    bridge, chunks = _build(files, model, layout)
    hf_model = bridge.build_hf_model()
    with torch.no_grad():
        for tensor in live_tensors(chunks).values():
            tensor.mul_(0.5)
    pointers = {name: parameter.data_ptr() for name, parameter in hf_model.named_parameters()}
    refresh_hf_model(bridge.checkpoint, hf_model, chunks)
    assert {name: parameter.data_ptr() for name, parameter in hf_model.named_parameters()} == pointers
    again = Bridge.from_model(hf_model)
    again.checkpoint.check()
    wanted = {name: tensor * 0.5 for name, tensor in _source(model).items()}
    for name in again.hub_names():
        assert torch.equal(again.read(name), wanted[name]), name
    with torch.no_grad():
        logits = hf_model(models()[model].tokens()).logits
    torch.testing.assert_close(_run(bridge, chunks, model), logits, **TOLERANCE)


def parameters_are_ready_for_the_optimizer(files: Files) -> None:
    """megatron-core's gradient norm counts a parameter on every tensor parallel rank, or once, by these attributes."""
    _, chunks = _build(files, "gqa", "tp2", sequence_parallel=True)
    for name, parameter in chunks[0].named_parameters():
        norm = "layernorm" in name
        assert getattr(parameter, "tensor_model_parallel", False) is not norm, name
        assert getattr(parameter, "sequence_parallel", False) is norm, name


def sharded_tensors_know_the_groups_of_today(files: Files) -> None:
    """PyTorch caches results of DTensor operators by ranks, with process groups that may have been destroyed."""
    for _ in range(2):
        groups.destroy()
        groups.initialize(Layout())
        group = parallel_state.get_data_parallel_group()
        mesh = DeviceMesh.from_group(group, "cpu", mesh=dist.get_process_group_ranks(group))
        doubled = DTensor.from_local(torch.ones(3), mesh, [Shard(0)]) * 2
        assert doubled.device_mesh.get_group().group_name == group.group_name
        assert torch.equal(doubled.full_tensor(), torch.full((6,), 2.0))


def bad_input_is_named(files: Files) -> None:
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("gqa"))
    with engine.refused("multiple of 4", "2 run"):
        build_megatron_model(bridge.checkpoint, Layout(tp=2, pp=2))
    with engine.refused("tp", "2 query groups"):
        build_megatron_model(bridge.checkpoint, Layout(tp=4))
    with engine.refused("tensor_parallelism"):
        build_megatron_model(bridge.checkpoint, Layout(tp=2), tensor_parallelism=2)
    chunks = build_megatron_model(bridge.checkpoint, Layout(tp=2))
    with engine.refused("tp", "groups"):
        build_megatron_model(bridge.checkpoint, Layout(pp=2))
    tied = Bridge.from_hf(files.hub("tied"))
    with engine.refused("Hub config"):
        list(stream_hf_weights(tied.checkpoint, chunks))
    smaller = Bridge.from_hf(files.hub("odd_vocabulary"))
    with engine.refused("linear_qkv.weight", "(64, 64)", "(96, 64)"):
        list(stream_hf_weights(smaller.checkpoint, chunks))
