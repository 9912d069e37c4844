"""Weights of a live megatron-core model under their Megatron names, and their loading from the Hub's tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.mapping import Link, Vocabulary
from dlm_bridge.convert.pool import run_tasks, worker_count
from dlm_bridge.convert.tensors import dtype_name
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel.core import dequantize_fp8_tensor, is_float8tensor, parallel_state
from dlm_bridge.parallel.fsdp import is_sharded, whole

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")


def live_tensors(chunks: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Every stored tensor of this rank's GPTModel chunks, by the name that `Link.megatron_name` gives it.

    Layers and experts carry their global numbers, and norms their Transformer Engine name, whichever layer spec the
    model has.
    """
    return {
        _global_name(chunk, name): tensor
        for chunk in chunks
        for name, tensor in chunk.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and not name.endswith("._extra_state")
    }


def _global_name(chunk: Any, name: str) -> str:
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    index, _, rest = name.removeprefix(prefix).partition(".")
    layer = chunk.decoder.layers[int(index)]
    for local, stored in layer.submodules_config.sharded_state_dict_keys_map.items():
        if rest.startswith(local):
            rest = stored + rest.removeprefix(local)
    if rest.startswith("mlp.experts."):
        rest = expert_name(rest, layer.mlp.local_expert_indices[0])
    return f"{prefix}{layer.layer_number - 1}.{rest}"


def expert_name(name: str, first: int) -> str:
    """The mapping's name of an expert's tensor, which a layer holds as `mlp.experts.local_experts.{i}.…` (one module
    an expert) or as `mlp.experts.….weight{i}` (grouped); `first` is the global number of its first expert."""
    if match := _SEQUENTIAL.fullmatch(name):
        return f"mlp.experts.experts.{first + int(match[1])}.{match[2]}"
    if match := _GROUPED.fullmatch(name):
        return f"mlp.experts.experts.{first + int(match[2])}.{match[1]}"
    return name


def tensor_parallel(link: Link) -> tuple[int, int]:
    """This process's rank and the size of the group over which a link's tensor is split: experts have their own."""
    if link.expert is not None:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def check_source(checkpoint: Checkpoint) -> None:
    """Raise DlmBridgeError unless the source's tensors and the mapping cover each other exactly, and a redundant
    tensor is the copy that it must be."""
    checkpoint.check()
    for name, carried in checkpoint.carried.items():
        if not carried.copy_of or name in checkpoint.derived:
            continue
        if not torch.equal(checkpoint.read(name), checkpoint.read(carried.copy_of)):
            raise DlmBridgeError(f"{checkpoint.where}: {name} differs from {carried.copy_of}, which it must equal")


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The one dtype of all the source's weights, but for those that keep their own. Raises DlmBridgeError where they
    differ."""
    first: dict[torch.dtype, str] = {}
    for name, link in checkpoint.link_of.items():
        if not link.rule.own_dtype:
            first.setdefault(checkpoint.spec(name)[0], name)
    if len(first) > 1:
        (one, one_name), (two, two_name), *_ = first.items()
        raise DlmBridgeError(
            f"{checkpoint.where}: {one_name} is {dtype_name(one)} and {two_name} is {dtype_name(two)}: "
            "choose one dtype= for the Megatron model"
        )
    return next(iter(first))


def load(chunks: Sequence[Any], checkpoint: Checkpoint, values: bool = True) -> None:
    """Fill this rank's chunks, a few links at a time, reading only what its stages and experts are, each once.

    The values take the parameters' dtype, but a tensor with a dtype of its own (a router in fp32) is never narrowed;
    padded vocabulary rows become zero. Without `values` all is zero, and only the tensors with a dtype of their own
    are read, which decides the parameters'. Raises DlmBridgeError where a tensor of the model is not set exactly once
    or has another shape.
    """
    live = live_tensors(chunks)
    unset = set(live)
    tasks = []
    for link in checkpoint.links:
        targets = {name: live[name] for name in places(link) if name in live}
        for name in targets:
            if name not in unset:
                raise DlmBridgeError(f"{name}: the mapping sets this parameter twice")
            unset.remove(name)
        if targets and (values or link.rule.own_dtype):
            tasks.append((link_bytes(checkpoint, link), partial(_load_link, checkpoint, link, targets)))
        else:
            for target in targets.values():
                target.data.zero_()
    if unset:
        raise DlmBridgeError(f"{min(unset)}: the mapping does not set this parameter of the Megatron model")
    run_tasks(tasks, worker_count(None))


@torch.no_grad()
def _load_link(checkpoint: Checkpoint, link: Link, targets: dict[str, torch.Tensor]) -> None:
    whole = link.to_megatron(checkpoint.read_link(link))
    for name, target in targets.items():
        shard = shard_of(link, whole, target)
        with torch.accelerator.device_index(target.device.index):  # a new thread's is the first device
            _fill(name, target, shard, link)


def shard_of(link: Link, whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What this process's tensor parallel rank holds of a link's whole tensor, in the parameter `target`: without the
    rows of a padded vocabulary, which `target` may have besides."""
    rank, size = tensor_parallel(link)
    if is_vocabulary(link):
        return whole.narrow(0, *vocabulary_range(link, rank, target.shape[0]))
    return link.shard(whole, rank, size)


def link_bytes(checkpoint: Checkpoint, link: Link) -> int:
    """The size of a link's stored tensors."""
    specs = [checkpoint.spec(name) for name in link.hub_names]
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """A live tensor's values, also where Transformer Engine keeps it in FP8; where FSDP shares it out, its data
    parallel ranks call this together."""
    if is_sharded(tensor):
        return whole(tensor)
    return dequantize_fp8_tensor(tensor) if is_float8tensor(tensor) else tensor.detach()


def places(link: Link) -> tuple[str, ...]:
    """Where a link's tensor stands in a model: a tied embedding also is the last pipeline stage's output layer."""
    if link.dims.tied and link.megatron_name == EMBEDDING:
        return (EMBEDDING, OUTPUT)
    return (link.megatron_name,)


def _fill(name: str, target: torch.Tensor, shard: torch.Tensor, link: Link) -> None:
    """Copy a shard into a parameter, which may have more rows where it is a padded vocabulary."""
    rows = shard.shape[0]
    padded = is_vocabulary(link) and target.shape[1:] == shard.shape[1:] and target.shape[0] > rows
    if target.shape != shard.shape and not padded:
        raise DlmBridgeError(
            f"{name}: the Megatron model has shape {tuple(target.shape)} here, but the mapping gives "
            f"{tuple(shard.shape)}"
        )
    if link.rule.own_dtype:
        target.data = target.data.to(torch.promote_types(target.dtype, shard.dtype))
    if rows < len(target):
        target.data[:rows].copy_(shard)
        target.data[rows:].zero_()
    else:
        target.copy_(shard)  # whole, because a slice of FP8 weights may be a copy
    if hasattr(target, "get_high_precision_init_val"):  # of FP8 weights, from which the optimizer's masters start
        target.get_high_precision_init_val().copy_(shard)


def is_vocabulary(link: Link) -> bool:
    """Whether rows are tokens, which Megatron may pad."""
    return isinstance(link.rule, Vocabulary)


def vocabulary_range(link: Link, tp_rank: int, rows: int) -> tuple[int, int]:
    """The (start, length) of the true vocabulary that a tensor parallel rank with `rows` rows holds; what is left of
    the rows is padding, which only the last ranks have."""
    vocab = link.megatron_shape[0]
    start = min(tp_rank * rows, vocab)
    return start, min(rows, vocab - start)
