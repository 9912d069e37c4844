"""FSDP2: sharding a Hub model, gradient clipping, and gathering full weights."""

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

from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.job import process_group_ends, start_process_group
from dlm_bridge.loading.lazy import LazyWeights, ShardSource, replace_parameters, shard_source
from dlm_bridge.loading.pretrained import decoder_layers
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.files import Config


def with_launcher_settings(config: Config) -> Config:
    """Apply the FSDP settings of `accelerate launch`, except for the wrapping policy: the units are decoder layers.
    Raises SettingError for another precision and for FSDP1."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", config.precision.precision):
        raise SettingError(
            "precision",
            f"{config.precision.precision} contradicts accelerate's configuration, {precision}: use {precision}, or "
            "launch with mixed_precision no",
        )
    if not _env_flag("ACCELERATE_USE_FSDP"):
        return config
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise SettingError("sharding", "accelerate is configured for FSDP version 1: launch with fsdp_version 2")
    return config.replace(
        sharding="fsdp",
        cpu_offload=config.parallel.cpu_offload or _env_flag("FSDP_OFFLOAD_PARAMS"),
        gradient_checkpointing=config.engine.gradient_checkpointing or _env_flag("FSDP_ACTIVATION_CHECKPOINTING"),
    )


@contextlib.contextmanager
def process_group(config: TrainConfig) -> Iterator[None]:
    """Context manager with the process group that FSDP needs: a launcher's, or a new one of one process."""
    with process_group_ends():
        if config.parallel.shards:
            start_process_group("nccl" if torch.cuda.is_available() else "gloo")
        yield


def device_mesh(config: TrainConfig, device: torch.device) -> DeviceMesh:
    """Device mesh of all processes: [shards], or [replicas, shards] with the shards of a replica on adjacent ranks.
    Raises LayoutError if `fsdp_replicas` does not divide the number of processes."""
    replicas, processes = config.parallel.fsdp_replicas, dist.get_world_size()
    if processes % replicas:
        raise LayoutError("fsdp_replicas", f"{replicas} does not divide {processes} processes")
    if replicas == 1:
        return init_device_mesh(device.type, (processes,))
    return init_device_mesh(device.type, (replicas, processes // replicas), mesh_dim_names=("replicate", "shard"))


def shard_model(model: nn.Module, weights: LazyWeights | None, config: TrainConfig, device: torch.device) -> None:
    """Shard `model` in place over all processes, or over each of `fsdp_replicas` groups of processes. Collective.

    Params keep their dtype (fp32 main params) and are gathered in the run's precision; gradients are averaged in fp32.
    Modules that transformers keeps in fp32 (routers) are units of their own, and compute in fp32. Tied weights stay
    tied, in the unit of the whole model. With `cpu_offload`, params, gradients and optimizer state stay in CPU memory.

    Args:
        model: on the meta device with `weights`; otherwise rank 0 has the weights, and the model of other ranks may be
            on the meta device.
        weights: source from which each process reads its shards.
    """
    dtype = None if config.precision.precision == "fp32" else torch.bfloat16
    offload = config.parallel.cpu_offload
    mesh = device_mesh(config, device)
    source = shard_source(model, weights, device)
    _to_meta(model, source.dtypes)
    settings: dict[str, Any] = {
        "mesh": mesh,
        # Gathered weights of a layer are freed after its forward pass, and gathered again for its backward pass.
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
    """Free weights gathered by a forward pass without a backward pass, so that `parameters()` are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clip_grad_norm(parameters: list[nn.Parameter], max_norm: float, device: torch.device) -> torch.Tensor:
    """Clip sharded gradients without waiting for the device. Returns their norm over all processes, float64 on
    `device`."""
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
    """Gather a sharded weight. Collective."""
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
    """Modules of a decoder layer whose own weights transformers keeps in fp32."""
    kept = tuple(model._get_dtype_plan(torch.bfloat16))
    for name, module in layer.named_modules():
        own = [f"layer.{name}.{weight}" for weight, _ in module.named_parameters(recurse=False)]
        if own and all(any(re.search(part, weight) for part in kept) for weight in own):
            yield module


def _to_meta(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Move a model's params to the meta device. Tied weights stay tied."""
    moved = {
        id(weight): nn.Parameter(
            torch.empty_like(weight, device="meta", dtype=dtypes[name]), requires_grad=weight.requires_grad
        )
        for name, weight in model.named_parameters()
    }
    replace_parameters(model, moved)


@torch.no_grad()
def _fill(model: nn.Module, source: ShardSource) -> None:
    """Load this process's shards of the weights, one weight at a time, and all buffers."""
    for weight, shard in zip(model.parameters(), source.shards(model), strict=True):
        assert isinstance(weight, DTensor)
        weight.to_local().copy_(shard)
    for name, _ in list(model.named_buffers(remove_duplicate=False)):
        owner, _, own_name = name.rpartition(".")
        model.get_submodule(owner)._buffers[own_name] = source.buffer(name)
