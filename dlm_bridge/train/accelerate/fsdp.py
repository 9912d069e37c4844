"""FSDP2: sharding a Hub model, gradient clipping, and gathering whole weights."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dlm_bridge.distributed import process_group_ends, start_process_group
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.loading.lazy import LazyWeights, ShardSource, replace_parameters, shard_source
from dlm_bridge.loading.pretrained import decoder_layers
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.files import Config


def with_launcher_settings(config: Config) -> Config:
    """The configuration with the settings of `accelerate launch` for FSDP. Decoder layers are the units, whatever its
    wrapping policy. Raises DlmBridgeError for another precision and for FSDP1."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", config.precision.precision):
        raise DlmBridgeError(
            f"accelerate is configured for {precision}, the run for --precision {config.precision.precision}: give "
            f"--precision {precision}, or launch with --mixed_precision no"
        )
    if not _env_flag("ACCELERATE_USE_FSDP"):
        return config
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise DlmBridgeError("accelerate is configured for FSDP's first version: launch with --fsdp_version 2")
    return config.replace(
        sharding="fsdp",
        cpu_offload=config.parallel.cpu_offload or _env_flag("FSDP_OFFLOAD_PARAMS"),
        gradient_checkpointing=config.engine.gradient_checkpointing or _env_flag("FSDP_ACTIVATION_CHECKPOINTING"),
    )


@contextlib.contextmanager
def process_group(config: TrainConfig) -> Iterator[None]:
    """A process group of one process for FSDP (which can offload to the CPU), unless a launcher has made a larger
    one."""
    with process_group_ends():
        if config.parallel.shards:
            start_process_group("nccl" if torch.cuda.is_available() else "gloo")
        yield


def device_mesh(config: TrainConfig, device: torch.device) -> DeviceMesh:
    """All processes: [shards], or [replicas, shards], where the shards of a group are neighbouring ranks. Raises
    DlmBridgeError where the processes do not divide."""
    replicas, processes = config.parallel.fsdp_replicas, dist.get_world_size()
    if processes % replicas:
        raise DlmBridgeError(f"--fsdp-replicas {replicas} does not divide {processes} processes: take a divisor")
    if replicas == 1:
        return init_device_mesh(device.type, (processes,))
    return init_device_mesh(device.type, (replicas, processes // replicas), mesh_dim_names=("replicate", "shard"))


def shard_model(model: nn.Module, weights: LazyWeights | None, config: TrainConfig, device: torch.device) -> None:
    """Shard `model` in place over all processes, or over those of each of `--fsdp-replicas` groups; all call this
    together.

    Each process reads its shards of `weights`, whose model is on the meta device; where there are none rank 0 has the
    weights, and on other ranks the model may be on the meta device. Params keep their dtype (fp32 main
    params) and are gathered in that of the run; gradients are averaged in fp32. What transformers keeps in fp32
    (routers) computes in it: such modules are units of their own. Tied weights stay tied, in the unit of the whole
    model. With `--cpu-offload` params, gradients and optimizer state stay in the CPU's memory.
    """
    dtype = None if config.precision.precision == "fp32" else torch.bfloat16
    offload = config.parallel.cpu_offload
    mesh = device_mesh(config, device)
    source = shard_source(model, weights, device)
    _to_meta(model, source.dtypes)
    settings: dict[str, Any] = {
        "mesh": mesh,
        # A layer's gathered weights are freed after its forward pass, and gathered again.
        "reshard_after_forward": _env_flag("FSDP_RESHARD_AFTER_FORWARD", "true"),
        "offload_policy": CPUOffloadPolicy(device.type == "cuda") if offload else OffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    exact = {**settings, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for layer in decoder_layers(model):
        if dtype is not None:
            for router in _kept_in_fp32(model, layer):
                fully_shard(router, **exact)
        fully_shard(layer, **settings)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if head is not None and head.weight is not embedding.weight:
        fully_shard(embedding, **settings)
        fully_shard(head, **{**settings, "reshard_after_forward": False})  # its backward pass comes next
    fully_shard(model, **{**settings, "reshard_after_forward": False})
    model.to_empty(device="cpu" if offload else device)
    _fill(model, source)


def reshard_model(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass has gathered: `parameters()` are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clip_grad_norm(parameters: list[nn.Parameter], max_norm: float, device: torch.device) -> torch.Tensor:
    """Clip sharded gradients and return their norm over all processes, in float64 on `device`, without waiting for the
    device."""
    gradients = [weight.grad.to_local() for weight in parameters if isinstance(weight.grad, DTensor)]
    norms = torch._foreach_norm(gradients) if gradients else []
    squares = torch.stack([norm.double().square() for norm in norms]).sum() if norms else torch.zeros(())
    squares = squares.to(device, torch.float64)
    sharded = next((weight for weight in parameters if isinstance(weight, DTensor)), None)
    dist.all_reduce(squares, group=None if sharded is None else sharded.device_mesh.get_group(-1))
    norm = squares.sqrt()
    if gradients:
        clip_coef = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils.clip_grad_norm_
        torch._foreach_mul_(gradients, clip_coef.to(gradients[0]))
    return norm


def full_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A sharded weight as a whole; every process calls this together."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local().to(device)  # NCCL does not gather from an offloaded weight's memory
    whole = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return whole.full_tensor()


def _env_flag(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true")


def _kept_in_fp32(model: Any, layer: nn.Module) -> Iterator[nn.Module]:
    """The modules of a decoder layer whose own weights transformers would not load in half precision."""
    kept = tuple(model._get_dtype_plan(torch.bfloat16))
    for name, module in layer.named_modules():
        own = [f"layer.{name}.{weight}" for weight, _ in module.named_parameters(recurse=False)]
        if own and all(any(re.search(part, weight) for part in kept) for weight in own):
            yield module


def _to_meta(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Move a model's params to the meta device, tied as before."""
    moved = {
        id(weight): nn.Parameter(
            torch.empty_like(weight, device="meta", dtype=dtypes[name]), requires_grad=weight.requires_grad
        )
        for name, weight in model.named_parameters()
    }
    replace_parameters(model, moved)


@torch.no_grad()
def _fill(model: nn.Module, source: ShardSource) -> None:
    """Give this process its shards of the weights, one weight at a time, and all of the buffers."""
    for weight, shard in zip(model.parameters(), source.shards(model), strict=True):
        assert isinstance(weight, DTensor)
        weight.to_local().copy_(shard)
    for name, _ in list(model.named_buffers(remove_duplicate=False)):
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = source.buffer(name)
