"""Differences between the supported versions of megatron-core, one function or name for each.

Two numbers after a path are its lines in 0.16.1 and in 0.19.2; elsewhere the version is named. Patches are in
`mcore_patches`, whose rows name their versions. Only this module and that table depend on the version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlm_bridge.errors import CheckpointError
from dlm_bridge.parallel import core, overrides

IS_0_16 = overrides.nearest_supported(core.version) == overrides.SUPPORTED[0]

# 0.19 announces for each GPTModel that HybridModel replaces it (models/gpt/gpt_model.py:118). HybridModel gives
# attention and feed-forward a layer number each, so its checkpoints are not in the layout that this package, Megatron
# Bridge and checkpoints of 0.16 share.
_GPT_MODEL_LOG, _GPT_MODEL_NOTE = "megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"
logging.getLogger(_GPT_MODEL_LOG).addFilter(lambda record: not record.getMessage().startswith(_GPT_MODEL_NOTE))

# Name of the layer in a multi-token prediction layer: transformer/multi_token_prediction.py 666, 1039. Checkpoints of
# both versions call it transformer_layer.
PREDICTED_LAYER = "transformer_layer" if IS_0_16 else "mtp_model_layer"

# Field that selects the modules recorded in CUDA graphs: transformer/transformer_config.py 784, 1047.
GRAPHED_MODULES = "cuda_graph_scope" if IS_0_16 else "cuda_graph_modules"

# True if Megatron FSDP may overlap the reduction of unsharded gradients (`fsdp=optim`). 0.16 then adds the reduced
# gradients to the rank's own; without overlap they replace them. 0.19 replaces them in both cases:
# distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py 3182, 4104.
FSDP_OVERLAPS_WHOLE_GRADIENTS = not IS_0_16


def mlp_submodules(layer: Any) -> Any:
    """Submodules of the feed-forward in a layer's submodules. In 0.16 `mlp` is a ModuleSpec
    (models/gpt/gpt_layer_specs.py:500), in 0.19 a partial function (models/gpt/gpt_layer_specs.py:521)."""
    return layer.mlp.submodules if IS_0_16 else layer.mlp.keywords["submodules"]


def prediction_submodules(norm: Any, linear: Any, layer: Any) -> Any:
    """Submodules of a multi-token prediction layer: transformer/multi_token_prediction.py 388, 571."""
    names = {"enorm": norm, "hnorm": norm, "layer_norm": norm, "eh_proj": linear, PREDICTED_LAYER: layer}
    return core.MultiTokenPredictionLayerSubmodules(**names)


def prediction_inputs(
    input_ids: torch.Tensor, position_ids: Any, padding_mask: Any, embedded: torch.Tensor, hidden: torch.Tensor
) -> tuple[Any, ...]:
    """Result of MultiTokenPredictionLayer._get_embeddings: transformer/multi_token_prediction.py 681, 1064. 0.19 adds
    the padding mask."""
    return (input_ids, position_ids, *(() if IS_0_16 else (padding_mask,)), embedded, hidden)


def permute(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """Tokens sorted by expert, their weights and the inverse permutation: transformer/moe/moe_utils.py 289, 337. 0.19
    returns two values more."""
    tokens, weights, order, *_ = core.permute(*args, **kwargs)
    return tokens, weights, order


def moe_loss_scale(tokens: int, tp: int, cp: int) -> float:
    """Scale of the coefficients of the balancing and z losses that makes their sum over ranks and micro-batches a mean
    over `tokens`.

    megatron-core weights each rank's loss by its number of tokens, which sequence and context parallelism divide
    (without them ranks repeat the tokens, and it divides). These weights add up to tokens / (tp cp). 0.16
    (transformer/moe/router.py:416) leaves it so, and the factor is applied here; 0.19 applies it itself
    (transformer/moe/router.py:550, and 639 for the z loss).
    """
    return (tp * cp if IS_0_16 else 1) / tokens


def sequence_loss_scale(rows: int) -> int:
    """Further factor for a balancing loss over each of a micro-batch's `rows`. 0.16 multiplies it by one row's tokens
    (transformer/moe/router.py:315), 0.19 by those of all rows (transformer/moe/router.py:447)."""
    return rows if IS_0_16 else 1


def grads_for_norm(part: Any) -> list[torch.Tensor]:
    """Gradients of an optimizer that count in the norm on this rank: optimizer/optimizer.py 136, 280."""
    found: list[torch.Tensor] = (part.get_main_grads_for_grad_norm if IS_0_16 else part.get_grads_for_grad_norm)()
    return found


def data_parallel(chunk: Any, config: Any, disable_bucketing: bool) -> Any:
    """Wrap a model in DistributedDataParallel. 0.19 expects the layout of a distributed optimizer's buffers, and warns
    where it has to compute it itself (distributed/distributed_data_parallel.py, 0.19: 51 and 132)."""
    more: dict[str, Any] = {}
    if not IS_0_16 and config.use_distributed_optimizer:
        more["full_param_layout"] = _buffer_layout(chunk, config, disable_bucketing)
    return core.DistributedDataParallel(chunk.config, config, chunk, disable_bucketing, **more)


def _buffer_layout(chunk: Any, config: Any, disable_bucketing: bool) -> Any:
    """Layout of the buffers of a distributed optimizer, with the buckets that DistributedDataParallel would make."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.setup_process_groups_for_ddp(None, chunk.config, config)
    size = None
    if config.overlap_grad_reduce and not disable_bucketing and groups["pp_group"].rank() == 0:
        size = config.bucket_size or max(40_000_000, 1_000_000 * groups["dp_group"].size())
    ranks, expert_ranks = groups["intra_dp_cp_group"].size(), groups["intra_expt_dp_group"].size()
    trained = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
    return DistributedOptimizer.compute_full_param_layout(trained, size, ranks, config, expert_ranks)


def tensor_parallel_axis(parameter: torch.Tensor) -> int | None:
    """Axis along which a parameter under Megatron FSDP is sharded over tensor parallel ranks; None if it is
    replicated. 0.16 marks it with private attributes (distributed/fsdp/mcore_fsdp_adapter.py:176), 0.19 has a function
    (distributed/fsdp/src/megatron_fsdp/utils.py:848)."""
    if not IS_0_16:
        from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_mcore_tensor_parallel_partition_dim

        axis: int | None = get_mcore_tensor_parallel_partition_dim(parameter)
        return axis
    shared = getattr(parameter, "_mcore_tp", False) or getattr(parameter, "tensor_model_parallel", False)
    if not shared or getattr(parameter, "_tp_duplicated", False):
        return None
    return int(getattr(parameter, "_tp_partition_dim", getattr(parameter, "partition_dim", 0)))


class Saving(NamedTuple):
    """How checkpoints are saved: maker of the queue of background saves, module of the writers, and arguments of
    dist_checkpointing.save."""

    queue: Callable[[], Any]
    writers: Any
    options: dict[str, str]


def saving(in_background: bool) -> Saving:
    """Functions for saving checkpoints. For background saves 0.19 uses nvidia-resiliency-ext (`nvrx`) if it is
    installed; the alternative, `mcore`, is the strategy of 0.16, and deprecated in 0.19
    (dist_checkpointing/serialization.py 314, 359). With either, each background save forks a process."""
    if in_background and not IS_0_16:
        from megatron.core.dist_checkpointing.strategies.nvrx import has_nvrx_async_support

        if has_nvrx_async_support():
            from nvidia_resiliency_ext.checkpointing.async_ckpt import core as resiliency
            from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async

            queue = partial(resiliency.AsyncCallsQueue, persistent=False)
            return Saving(queue, filesystem_async, {"async_strategy": "nvrx"})
    return Saving(core.AsyncCallsQueue, core.filesystem_async, {} if IS_0_16 else {"async_strategy": "mcore"})


def check_readable(folder: Path) -> None:
    """Raise CheckpointError for a torch_dist iteration that this version does not read. 0.16 reads only common.pt
    (dist_checkpointing/serialization.py:121), 0.19 also its own object (dist_checkpointing/serialization.py:207)."""
    if IS_0_16 and not (folder / "common.pt").is_file():
        raise CheckpointError(
            folder,
            f"has no common.pt: megatron-core 0.19 saves none, but {core.version} is installed: resume with 0.19 on "
            "Python 3.12 or later, or export it and start from that",
        )
