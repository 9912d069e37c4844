"""Process groups of torch.distributed and megatron-core for a Layout and a ContextParallelConfig, and Transformer
Engine's userbuffers (`tp_overlap`), which overlap tensor parallel communication with matrix products.

With userbuffers (`TransformerConfig.tp_comm_overlap`) a linear layer gathers its input, or reduces its output, in
chunks while it multiplies other chunks. Each kind of product has a buffer of one micro-batch's hidden states. Layers
look up the buffers when they are built, and products take their sizes from them: every micro-batch, in evaluation too,
must have the number of tokens that the buffers were made for. Sums are in bf16, whatever a buffer's dtype. Userbuffers
are for large layers and slow links: over the NVLink of two H100s they gained 1% (November 2026).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist

from dlm_bridge import distributed
from dlm_bridge.errors import LayoutError, MissingExtraError, one_line
from dlm_bridge.job import start_process_group
from dlm_bridge.mapping.layout import ContextParallelConfig, Layout
from dlm_bridge.parallel import mcore_patches, platform
from dlm_bridge.parallel.core import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    named_refusals,
    parallel_state,
)
from dlm_bridge.parallel.mcore_patches.process_wide import destroy_process_groups
from dlm_bridge.parallel.platform import Platform

SKIP_MULTICAST = "UB_SKIPMC"  # Transformer Engine's variable: 1 for CUDA IPC in place of NVLink multicast


def initialize(
    layout: Layout,
    seed: int = 1234,
    parallel: ContextParallelConfig | None = None,
    graphs: bool = False,
    instances: int | None = None,
) -> None:
    """Initialise the process groups of `layout` and `parallel`; the remaining ranks are data parallel.

    Every process calls it. Under torchrun (or with its environment variables set) it joins the other processes,
    otherwise the world is this process. Existing groups are kept if they fit.

    Args:
        seed: for megatron-core's random number tracker and, as in megatron-core, the platform's default generator,
            unless the tracker is seeded already.
        parallel: context parallelism; None for none.
        graphs: use a tracker whose states CUDA graphs can advance.
        instances: number of distributed optimizer instances; None for the existing number, or one.

    Raises LayoutError if the number of processes or the existing groups do not fit the layout, and MissingExtraError
    if communication needs a package that is missing.
    """
    parallel = parallel or ContextParallelConfig()
    current = platform.current()
    mcore_patches.install(current)
    if parallel.cp_comm_type in ("a2a", "a2a+p2p") and not current.uses_transformer_engine():
        raise MissingExtraError("cp_comm_type", f"{parallel.cp_comm_type} needs Transformer Engine: choose another")
    _join(current, layout, parallel)
    if parallel_state.model_parallel_is_initialized():
        _check_groups(layout, parallel, instances)
    else:
        layout.check_optimizer_instances(instances or 1, dist.get_world_size())
        with named_refusals(ImportError):  # hierarchical groups need einops
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.expert_tp,
                context_parallel_size=parallel.cp,
                hierarchical_context_parallel_sizes=_list(parallel.hierarchical_cp_sizes),
                num_distributed_optimizer_instances=instances or 1,
            )
    tracker = get_cuda_rng_tracker()
    # In a graph Transformer Engine's attention accepts only its own tracker, which lacks this field.
    if not tracker.is_initialized() or (graphs and not getattr(tracker, "use_cudagraphable_rng", True)):
        engines = graphs and current.uses_transformer_engine()
        model_parallel_cuda_manual_seed(
            seed, te_rng_tracker=engines, use_cudagraphable_rng=graphs and not engines, force_reset_rng=True
        )


def destroy() -> None:
    """Destroy megatron-core's groups, so that another layout can be initialised. torch.distributed stays initialised.
    Every process calls it."""
    if parallel_state.model_parallel_is_initialized():
        destroy_process_groups()
    get_cuda_rng_tracker().reset()


def _join(current: Platform, layout: Layout, parallel: ContextParallelConfig) -> None:
    """Initialise torch.distributed unless it is initialised."""
    need = parallel.world_size(layout)
    world = dist.get_world_size() if dist.is_initialized() else distributed.world_size()
    if world % need:
        raise LayoutError(
            "layout",
            f"{_sizes(layout, parallel)} needs a multiple of {need} processes, but {world} run: set "
            f"`nproc_per_node={need}`, or choose another layout",
        )
    start_process_group(current.backend, current.group_device())


def _check_groups(layout: Layout, parallel: ContextParallelConfig, instances: int | None = None) -> None:
    for name, (found, wanted) in _found_and_wanted(layout, parallel, instances).items():
        if found != wanted:
            raise LayoutError(
                name, f"{wanted}, but megatron-core's groups exist with {found}: use that, or destroy the groups first"
            )


def _found_and_wanted(
    layout: Layout, parallel: ContextParallelConfig, instances: int | None
) -> dict[str, tuple[object, object]]:
    hierarchy = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    between = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    found = 1 if between is None else between.size()
    return {
        "tp": (parallel_state.get_tensor_model_parallel_world_size(), layout.tp),
        "pp": (parallel_state.get_pipeline_model_parallel_world_size(), layout.pp),
        "vp": (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1, layout.vp),
        "ep": (parallel_state.get_expert_model_parallel_world_size(), layout.ep),
        "etp": (parallel_state.get_expert_tensor_parallel_world_size(), layout.expert_tp),
        "cp": (parallel_state.get_context_parallel_world_size(), parallel.cp),
        "hierarchical_cp_sizes": (
            hierarchy and [group.size() for group in hierarchy],
            _list(parallel.hierarchical_cp_sizes),
        ),
        "optimizer_instances": (found, found if instances is None else instances),
    }


def _list(sizes: tuple[int, ...] | None) -> list[int] | None:
    return None if sizes is None else list(sizes)


def _sizes(layout: Layout, parallel: ContextParallelConfig) -> str:
    context = f" x cp {parallel.cp}" if parallel.cp > 1 else ""
    experts = f" (experts: ep {layout.ep} x etp {layout.expert_tp})" if layout.ep > 1 or layout.etp is not None else ""
    return f"tp {layout.tp} x pp {layout.pp}{context}{experts}"


def check_userbuffers(tp: int) -> None:
    """Raise MissingExtraError without Transformer Engine, and LayoutError if tensor parallel ranks span nodes."""
    if not platform.current().uses_transformer_engine():
        raise MissingExtraError("tp_overlap", "needs Transformer Engine and GPUs: pip install 'dlm-bridge[te]'")
    if (local := distributed.local_world_size()) % tp:
        raise LayoutError("tp", f"{tp} must divide the {local} processes of a node for `tp_overlap`")


def make_userbuffers(tokens: int, hidden_size: int, tp: int, fp8: bool, mixed: bool, backend: str) -> None:
    """Create the buffers for hidden states [tokens, hidden_size] of a context parallel rank's micro-batch; earlier
    ones are destroyed. Every process calls it.

    Args:
        fp8: for layers in FP8.
        mixed: for layers in bf16 as well.
        backend: of torch.distributed, with which ranks exchange addresses.

    Raises MissingExtraError if the machine does not support them.
    """
    from transformer_engine.pytorch.module import base

    destroy_userbuffers()
    if os.environ.get("NCCL_NVLS_ENABLE") == "0":  # multicast is disabled on this machine
        os.environ.setdefault(SKIP_MULTICAST, "1")
    mode = base.UserBufferQuantizationMode
    modes = [mode.FP8 if fp8 else mode.NONE] + [mode.NONE] * (fp8 and mixed)
    try:
        base.initialize_ub([tokens, hidden_size], tp, quantization_modes=modes, bootstrap_backend=backend)
    except RuntimeError as error:  # from the driver, or from CUDA IPC in a container
        raise MissingExtraError("tp_overlap", f"this machine lacks userbuffers: {one_line(error)}") from error


def destroy_userbuffers() -> None:
    """Free the buffers, if there are any. No other rank may use them any more: the last step's sums over all ranks
    have been read, or the process ends."""
    base: Any = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is not None and base.is_ub_initialized():
        platform.current().synchronize()
        base.destroy_ub()
