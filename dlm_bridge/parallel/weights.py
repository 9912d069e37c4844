"""Weights of a live megatron-core model under their Megatron names, and their loading from the Hub's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dlm_bridge.convert.mapping import Dims, Link, Mapping, Vocabulary
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel.core import parallel_state

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def live_tensors(chunks: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Every stored tensor of this rank's GPTModel chunks, by the name that `Link.megatron_name` gives it.

    Layers carry their global number, and norms their Transformer Engine name, whichever layer spec the model has.
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
    return f"{prefix}{layer.layer_number - 1}.{rest}"


def check_coverage(mapping: Mapping, dims: Dims, hub_names: set[str]) -> None:
    """Raise DlmBridgeError unless the mapping uses exactly `hub_names`, each once, but for those that are carried."""
    used: set[str] = set()
    for link in mapping.links(dims):
        for name in link.hub_names:
            if name in used:
                raise DlmBridgeError(f"{name}: the mapping uses this tensor twice")
            if name not in hub_names:
                raise DlmBridgeError(f"{name}: this tensor is missing in the source")
            used.add(name)
    if extra := sorted(hub_names - used - mapping.carried_names(dims).keys()):
        raise DlmBridgeError(f"{extra[0]}: the source has this tensor, but the mapping does not know it")


def check_carried(mapping: Mapping, dims: Dims, hub_names: set[str], read: Callable[[str], torch.Tensor]) -> None:
    """Raise DlmBridgeError where a redundant tensor of the source is not the copy that it must be."""
    for name, carried in mapping.carried_names(dims).items():
        if name in hub_names and carried.copy_of and not torch.equal(read(name), read(carried.copy_of)):
            raise DlmBridgeError(f"{name} differs from {carried.copy_of}, of which it must be a copy")


@torch.no_grad()
def load(chunks: Sequence[Any], mapping: Mapping, dims: Dims, read: Callable[[str], torch.Tensor], cast: bool) -> None:
    """Fill this rank's chunks from `read(hub_name)`, one link at a time, reading only what the rank holds.

    Padded vocabulary rows become zero. `cast` allows the dtype to change. Raises DlmBridgeError where a tensor of the
    model is not set exactly once, or where shapes or (without `cast`) dtypes differ.
    """
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    live = live_tensors(chunks)
    unset = set(live)
    for link in mapping.links(dims):
        names = [name for name in _places(link, dims) if name in live]
        if not names:
            continue
        sources = [_checked(link, i, read(name)) for i, name in enumerate(link.hub_names)]
        whole = link.to_megatron(sources)
        for name in names:
            shard = link.shard(whole, rank, size)
            if is_vocabulary(link):
                shard = whole.narrow(0, *vocabulary_range(link, rank, live[name].shape[0]))
            if name not in unset:
                raise DlmBridgeError(f"{name}: the mapping sets this parameter twice")
            if not cast and shard.dtype != live[name].dtype:
                raise DlmBridgeError(
                    f"{link.hub_names[0]} is stored as {_short(shard.dtype)}, but the model is built as "
                    f"{_short(live[name].dtype)}: pass dtype= to change it"
                )
            _fill(name, live[name], shard, link)
            unset.remove(name)
    if unset:
        raise DlmBridgeError(f"{min(unset)}: the mapping does not set this parameter of the Megatron model")


def _places(link: Link, dims: Dims) -> tuple[str, ...]:
    """Where a link's tensor stands in a model: a tied embedding also is the last pipeline stage's output layer."""
    if dims.tied and link.megatron_name == EMBEDDING:
        return (EMBEDDING, OUTPUT)
    return (link.megatron_name,)


def _checked(link: Link, index: int, tensor: torch.Tensor) -> torch.Tensor:
    if tuple(tensor.shape) != link.hub_shapes[index]:
        raise DlmBridgeError(
            f"{link.hub_names[index]} has shape {tuple(tensor.shape)}, but the config asks for "
            f"{link.hub_shapes[index]}"
        )
    return tensor


def _fill(name: str, target: torch.Tensor, shard: torch.Tensor, link: Link) -> None:
    """Copy a shard into a parameter, which may have more rows where it is a padded vocabulary."""
    rows = shard.shape[0]
    padded = is_vocabulary(link) and target.shape[1:] == shard.shape[1:] and target.shape[0] > rows
    if target.shape != shard.shape and not padded:
        raise DlmBridgeError(
            f"{name}: the Megatron model has shape {tuple(target.shape)} here, but the mapping gives "
            f"{tuple(shard.shape)}"
        )
    target.data[:rows].copy_(shard)
    target.data[rows:].zero_()


def is_vocabulary(link: Link) -> bool:
    """Whether rows are tokens, which Megatron may pad."""
    return isinstance(link.rule, Vocabulary)


def vocabulary_range(link: Link, tp_rank: int, rows: int) -> tuple[int, int]:
    """The (start, length) of the true vocabulary that a tensor parallel rank with `rows` rows holds; what is left of
    the rows is padding, which only the last ranks have."""
    vocab = link.megatron_shape[0]
    start = min(tp_rank * rows, vocab)
    return start, min(rows, vocab - start)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
