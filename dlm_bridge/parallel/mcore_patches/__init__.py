"""Table of every patch of megatron-core, class swap and use of its private attributes: `PATCHES`.

They are written for the versions in `overrides.SUPPORTED`, whose source lines the table cites; a row without a line
for a version does not apply to it. `install` installs the process-wide replacements (`replaces`) before a run joins
its process groups; the others are applied by `code` to a module or optimizer, or within a context. `dlm-bridge env`
prints the table. The code is in `process_wide` (the CPU platform, torch's Adam), `modules`, `optimizers`, `fused_step`
and `fsdp`. Other differences between the versions are in `parallel.mcore_compat`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dlm_bridge.parallel import overrides
from dlm_bridge.parallel.mcore_patches import process_wide as process
from dlm_bridge.parallel.overrides import Table
from dlm_bridge.parallel.platform import CPU, Platform


@dataclass(frozen=True)
class Condition:
    """Condition under which a patch applies: a description, and a predicate of the platform."""

    words: str
    met: Callable[[Platform], bool]


@dataclass(frozen=True)
class Patch:
    """One row of the table."""

    target: str  # name or names in megatron-core
    what: str  # the replacement, or the use of a private name
    why: str
    source: str  # path in megatron-core
    lines: tuple[int | None, ...]  # for each version in `overrides.SUPPORTED`; None if the patch does not apply to it
    when: Condition
    code: str = ""  # where the patch is, unless in `replaces`; relative to this folder
    replaces: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)  # dotted name -> replacement's maker

    @property
    def versions(self) -> tuple[str, ...]:
        """Supported versions of megatron-core to which it applies."""
        return tuple(version for version, line in zip(overrides.SUPPORTED, self.lines, strict=True) if line)

    def cited(self, version: str) -> str:
        """path:line in an installed version of megatron-core; the path alone if the patch does not apply to it."""
        line = self.lines[overrides.SUPPORTED.index(overrides.nearest_supported(version))]
        return f"{self.source}:{line}" if line else self.source

    def applies(self, platform: Platform, version: str) -> bool:
        """True if it applies on a platform to an installed version of megatron-core."""
        return self.when.met(platform) and overrides.nearest_supported(version) in self.versions


def anywhere(words: str) -> Condition:
    """Condition that every platform meets."""
    return Condition(words, lambda platform: True)


def on_accelerators(words: str) -> Condition:
    """Condition that every platform except the CPU meets."""
    return Condition(words, lambda platform: not ON_CPU.met(platform))


def with_te(words: str) -> Condition:
    """Condition that platforms with Transformer Engine's layers meet."""
    return Condition(words, lambda platform: platform.uses_transformer_engine())


def without_te(words: str) -> Condition:
    """Condition that platforms without Transformer Engine's layers meet."""
    return Condition(words, lambda platform: not platform.uses_transformer_engine())


ON_CPU = Condition("the CPU platform", lambda platform: isinstance(platform, CPU))
TORCH_ADAM = Condition(
    "neither Transformer Engine nor apex", lambda platform: ON_CPU.met(platform) or process.uses_torch_adam()
)

_TORCH_ON_CPU = process.TorchOnCPU("torch")
_FP32 = "megatron.core.optimizer.optimizer.FP32Optimizer"
_FLOAT16 = "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params"
_MIXED = "megatron.core.optimizer.optimizer.MixedPrecisionOptimizer"  # base class of the distributed optimizer
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_RANDOM = "megatron.core.tensor_parallel.random"
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync"

CPU_PATCHES = (
    Patch(
        target="torch, in 18 modules",
        what='the device "cuda" is the CPU, memory is never pinned, streams are no-ops',
        why='they create tensors with device="cuda" and use streams',
        source="pipeline_parallel/schedules.py",
        lines=(596, 749),
        when=ON_CPU,
        replaces={f"{module}.torch": process.replace_with(_TORCH_ON_CPU) for module in process.CUDA_ONLY_MODULES},
    ),
    Patch(
        target="torch.cuda",
        what="current_device is the CPU, synchronize is a no-op",
        why="parameters, rotary frequencies, buffers and the checkpoint's status are on the current CUDA device",
        source="tensor_parallel/layers.py",
        lines=(261, 305),
        when=ON_CPU,
        replaces={
            "torch.cuda.current_device": process.replace_with(process.cpu_device),
            "torch.cuda.synchronize": process.replace_with(process.do_nothing),
        },
    ),
    Patch(
        target="torch.Tensor",
        what="cuda() returns the tensor itself, type() names CUDA, record_stream() is a no-op",
        why="a tied output layer copies the embedding with .cuda(); optimizers compare type() with "
        "torch.cuda.FloatTensor; schedule plans run on two streams",
        source="models/common/language_module/language_module.py",
        lines=(244, 307),
        when=ON_CPU,
        replaces={
            "torch.Tensor.cuda": process.replace_with(process.same_tensor),
            "torch.Tensor.type": process.cuda_type_name,
            "torch.Tensor.record_stream": process.replace_with(process.do_nothing),
        },
    ),
    Patch(
        target="the CUDA generator",
        what="the CPU's default generator, without a warning",
        why="the random number tracker forks it in attention, in recomputation and under sequence parallelism",
        source="tensor_parallel/random.py",
        lines=(72, 135),
        when=ON_CPU,
        replaces={
            "torch.cuda.manual_seed": process.replace_with(process.cpu_manual_seed),
            "torch.cuda.get_rng_state": process.replace_with(process.cpu_rng_state),
            "torch.cuda.random.get_rng_state": process.replace_with(process.cpu_rng_state),
            f"{_RANDOM}._set_cuda_rng_state": process.replace_with(process.set_cpu_rng_state),
            f"{_RANDOM}.logging": process.silent_logging,
        },
    ),
    Patch(
        target="maybe_move_tensor_to_cpu",
        what="split sizes become numbers on the CPU too",
        why="it converts only tensors on a GPU",
        source="transformer/moe/moe_utils.py",
        lines=(1078, 1169),
        when=ON_CPU,
        replaces={
            "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": process.replace_with(
                process.split_sizes_on_cpu
            )
        },
    ),
    Patch(
        target="ShardedTensor.init_data",
        what='the device "cuda" is the CPU',
        why="ranks that read a checkpoint together allocate each other's tensors on the GPU",
        source="dist_checkpointing/mapping.py",
        lines=(247, 247),
        when=ON_CPU,
        replaces={"megatron.core.dist_checkpointing.mapping.ShardedTensor.init_data": process.init_data_on_cpu},
    ),
    Patch(
        target="transformer_engine, apex",
        what="cannot be imported",
        why="their optimizers, norms and products are used if they are installed, but need a GPU",
        source="optimizer/__init__.py",
        lines=(13, 14),
        when=ON_CPU,
        code="dlm_bridge.parallel.core:hide_gpu_packages",
    ),
)

TORCH_ADAM_PATCHES = (
    Patch(
        target="DistributedOptimizer, with torch's Adam",
        what="can be saved before the first step; every parameter has its own step count, which is not a tensor",
        why="it asserts that there is exactly one step count, and shares one tensor between all parameters",
        source="optimizer/distrib_optimizer.py",
        lines=(642, 839),
        when=TORCH_ADAM,
        replaces={
            f"{_DISTRIBUTED}.state_dict": process.adam_distributed_state_dict,
            f"{_DISTRIBUTED}.load_state_dict": process.adam_distributed_load_state_dict,
            f"{_DISTRIBUTED}._set_main_param_and_optimizer_states": process.adam_set_main_param_and_optimizer_states,
        },
    ),
    Patch(
        target="FP32Optimizer, Float16OptimizerWithFloat16Params, with torch's Adam",
        what="can be saved before the first step; a step count of zero, and on ranks without parameters",
        why="Adam creates its state in its first step and counts per parameter, but all ranks load what one saves",
        source="optimizer/optimizer.py",
        lines=(1012, 1355),
        when=TORCH_ADAM,
        replaces={
            f"{_MIXED}.step_with_ready_grads": process.adam_step_with_ready_grads,
            f"{_FP32}.step_with_ready_grads": process.adam_step_with_ready_grads,
            **{f"{name}.sharded_state_dict": process.adam_sharded_state_dict for name in (_FP32, _FLOAT16)},
            **{f"{name}.load_state_dict": process.adam_load_state_dict for name in (_FP32, _FLOAT16)},
        },
    ),
)

MODULE_PATCHES = (
    Patch(
        target="GPTModel._preprocess, GPTModel._postprocess",
        what="rotary embeddings at explicit positions; `forward` calls the output layer",
        why="its rotary embeddings are at positions 0, 1, 2, ..., and its loss is over every position",
        source="models/gpt/gpt_model.py",
        lines=(284, 316),
        when=anywhere("always"),
        code="dlm_bridge.parallel.gpt:BridgeGPTModel",
    ),
    Patch(
        target="GPTModel.build_schedule_plan",
        what="loss positions instead of labels",
        why="its loss is over every position",
        source="models/gpt/gpt_model.py",
        lines=(739, 798),
        when=anywhere("ep_overlap"),
        code="dlm_bridge.parallel.gpt:DeferredLoss",
    ),
    Patch(
        target="ColumnParallelLinear._forward_impl",
        what="logits are minus infinity in padded columns; the loss of the loss positions without logits",
        why="padding enters its softmax, and logits at every position need most of a step's memory",
        source="tensor_parallel/layers.py",
        lines=(948, 1094),
        when=anywhere("always: the output layer"),
        code="modules:OutputLayer",
    ),
    Patch(
        target="TransformerLayer._forward_mlp",
        what="the last layer's feed-forward at the loss positions only",
        why="no later layer reads the other positions",
        source="transformer/transformer_layer.py",
        lines=(683, 816),
        when=anywhere("the last layer if it is dense, without sequence parallelism and full recomputation"),
        code="modules:LossPositionsLayer",
    ),
    Patch(
        target="TensorReusePool.insert",
        what="no-op: every buffer of a CUDA graph belongs to that graph",
        why="an input is returned to the pool when its forward pass has been recorded, and becomes another layer's "
        "gradient before its own backward pass reads it",
        source="transformer/cuda_graphs.py",
        lines=(995, None),
        when=anywhere("cuda_graphs"),
        replaces={
            "megatron.core.transformer.cuda_graphs.TensorReusePool.insert": process.replace_with(process.do_nothing)
        },
    ),
    Patch(
        target="_CudagraphGlobalRecord",
        what="the buffers that CUDA graphs share are released when a run ends",
        why="`delete_cuda_graphs` does not release them",
        source="transformer/cuda_graphs.py",
        lines=(319, None),
        when=anywhere("cuda_graphs"),
        code="modules:release_graph_buffers",
    ),
    Patch(
        target="MoEAllGatherTokenDispatcher",
        what="token counts are copied to the CPU while tokens are gathered; one sum in the hidden states' dtype",
        why="it waits for the device twice per layer, and sums in the router's dtype",
        source="transformer/moe/token_dispatcher.py",
        lines=(208, 230),
        when=anywhere("moe_dispatcher=allgather"),
        code="modules:AllGatherDispatcher",
    ),
    Patch(
        target="TopKRouter.gating, TopKRouter._apply_expert_bias",
        what="plain torch",
        why="without Transformer Engine `te_general_gemm` is undefined; compiling two lines takes seconds",
        source="transformer/moe/router.py",
        lines=(532, 728),
        when=without_te("experts, without Transformer Engine"),
        code="modules:LocalRouter",
    ),
    Patch(
        target="moe_utils.te_general_gemm",
        what="operands of different dtypes are converted to the result's",
        why="cuBLAS refuses them: a router in fp32 with hidden states in bf16. 0.16 does not find Transformer Engine "
        "2.20's function, and uses torch's",
        source="transformer/moe/moe_utils.py",
        lines=(None, 1327),
        when=with_te("experts, Transformer Engine"),
        replaces={"megatron.core.transformer.moe.moe_utils.te_general_gemm": process.in_one_dtype},
    ),
    Patch(
        target="TopKRouter.routing",
        what="chooses a block's experts, then a token's among them; a hook passes a layer's mask to its router",
        why="megatron-core routes each token independently",
        source="transformer/moe/router.py",
        lines=(546, 742),
        when=anywhere("LLaDA2.2 (expert_capacity)"),
        code="modules:BlockRouter",
    ),
    Patch(
        target="RowParallelLinear.explicit_expert_comm",
        what="skips the reduction over the single rank of an expert with a bias; sets attributes of the bias",
        why="MLP adds the bias in place to the result of the reduction, which autograd refuses",
        source="transformer/mlp.py",
        lines=(247, 354),
        when=anywhere("experts with biases (gpt-oss)"),
        code="modules:patch_expert_biases",
    ),
    Patch(
        target="MultiTokenPredictionLayer._get_embeddings",
        what="embeddings of given tokens",
        why="it shifts each rank's part of a row, across document boundaries",
        source="transformer/multi_token_prediction.py",
        lines=(681, 1064),
        when=anywhere("multi-token prediction layers"),
        code="modules:PredictionLayer",
    ),
    Patch(
        target="multi_latent_attention.TELinear",
        what="replicated linear layer in plain torch",
        why="without Transformer Engine the name is None",
        source="transformer/multi_latent_attention.py",
        lines=(64, 80),
        when=without_te("latent attention, without Transformer Engine"),
        code="modules:patched_latent_linear",
    ),
    Patch(
        target="tensor_parallel.layers._grad_accum_fusion_available",
        what="true",
        why="its own linear layers need apex for gradient_accumulation_fusion, but `OutputLayer` does not use it",
        source="tensor_parallel/layers.py",
        lines=(924, 1070),
        when=with_te("Transformer Engine, without apex"),
        code="modules:patched_gradient_accumulation",
    ),
    Patch(
        target="extensions.transformer_engine.TEActivationOp",
        what="has no state in checkpoints",
        why="a feed-forward calls its modules' sharded_state_dict, which Transformer Engine's operations lack",
        source="extensions/transformer_engine.py",
        lines=(397, 588),
        when=with_te("Transformer Engine, dense models"),
        code="modules:TransformerEngineActivation",
    ),
    Patch(
        target="TEGroupedLinear._split_extra_state",
        what="an empty FP8 state stays empty",
        why="it splits the state, which in Transformer Engine 2.20 is empty for recipes without history",
        source="extensions/transformer_engine.py",
        lines=(1697, None),
        when=with_te("precision=fp8, grouped experts"),
        code="modules:patch_grouped_linear_state",
    ),
    Patch(
        target="yarn_rotary_pos_embedding._yarn_get_concentration_factor_from_config",
        what="YaRN's factor in the fused QK-norm and RoPE kernel",
        why="it has no public name",
        source="models/common/embeddings/yarn_rotary_pos_embedding.py",
        lines=(274, 274),
        when=with_te("Transformer Engine and Triton"),
        code="dlm_bridge.parallel.self_attention:rotary_table",
    ),
)

OPTIMIZER_PATCHES = (
    Patch(
        target="DistributedOptimizer.model_param_group_index_map",
        what="fp32 params come first in each group",
        why="it records main params in the order of the buffers, then moves fp32 params first: state is swapped",
        source="optimizer/distrib_optimizer.py",
        lines=(307, 347),
        when=anywhere("the distributed optimizer"),
        code="optimizers:patch_param_order",
    ),
    Patch(
        target="MegatronOptimizer.init_state_fn",
        what="creates momentum buffers before they are loaded",
        why="it is None for SGD, but a resume calls it",
        source="optimizer/__init__.py",
        lines=(408, 624),
        when=anywhere("optimizer=sgd"),
        code="optimizers:patch_sgd_resume",
    ),
    Patch(
        target="HybridDeviceOptimizer._update_fp32_params_by_new_state",
        what="sets the main params of every parameter from a checkpoint",
        why="a resume fails at the first parameter that is fp32 in the model, which has no second copy",
        source="optimizer/cpu_offloading/hybrid_optimizer.py",
        lines=(369, 369),
        when=with_te("optimizer_cpu_offload"),
        code="optimizers:patch_offloading_resume",
    ),
    Patch(
        target="param_index_map of the optimizer's buffers",
        what="offsets without the padding between buckets",
        why="state is gathered without padding, but split at offsets with it: parameters get a neighbour's state",
        source="optimizer/distrib_optimizer.py",
        lines=(1404, 1690),
        when=anywhere("the distributed optimizer"),
        code="optimizers:unpadded_param_index_map",
    ),
    Patch(
        target="Float16OptimizerWithFloat16Params.float16_groups",
        what="includes fp32 params, which are saved with the main params of the others",
        why="it assumes that there are none",
        source="optimizer/optimizer.py",
        lines=(797, 1135),
        when=anywhere("distributed_optimizer=False"),
        code="optimizers:fp32_params_included",
    ),
    Patch(
        target="DistributedOptimizer._get_main_param_and_optimizer_states, ._set_main_param_and_optimizer_states",
        what="main params inside Adam are saved and loaded in fp32",
        why="it saves the 16 bits that Adam stores instead, and an assertion fails when they are loaded",
        source="optimizer/distrib_optimizer.py",
        lines=(883, 1090),
        when=with_te("optimizer.use_precision_aware_optimizer"),
        code="optimizers:whole_main_params",
    ),
    Patch(
        target="DistributedOptimizer._get_model_param_range_map",
        what="the range of a parameter's elements in a rank's main param shard",
        why="it has no public name",
        source="optimizer/distrib_optimizer.py",
        lines=(610, 786),
        when=anywhere("the distributed optimizer"),
        code="optimizers:param_range",
    ),
    Patch(
        target="MixedPrecisionOptimizer._copy_main_params_to_model_params",
        what="no-op: the step's kernels clip gradients, update main params and round them in one pass",
        why="it needs one more pass over all gradients and one over all main params",
        source="optimizer/optimizer.py",
        lines=(585, 808),
        when=with_te("Transformer Engine's AdamW and Triton"),
        code="fused_step:FusedOptimizerStep",
    ),
)

FSDP_PATCHES = (
    Patch(
        target="GradReducePipeline._bucket_group_gradient_reduce",
        what="skips gradients that only one data parallel rank has",
        why="they would be added to themselves, doubling the sum over earlier micro-batches",
        source="distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py",
        lines=(3182, None),
        when=on_accelerators("fsdp"),
        code="fsdp:patch_unshared_gradients",
    ),
    Patch(
        target="TransformerLayer.__init__; DataParallelBuffer.set_item",
        what="layers are built without memory; each is allocated and loaded just before it is sharded",
        why="megatron-core builds the whole model first; its meta device is for random initialisation",
        source="distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py",
        lines=(1116, 1558),
        when=on_accelerators("fsdp=optim_grads_params"),
        code="fsdp:filled_when_sharded",
    ),
    Patch(
        target="ParamAndGradBuffer._init_distributed_params",
        what="ranks exchange the locations of all parameters' shards at once",
        why="it runs five collectives for each parameter: minutes with hundreds of experts in a layer",
        source="distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py",
        lines=(2488, 3216),
        when=on_accelerators("fsdp"),
        code="fsdp:located_at_once",
    ),
    Patch(
        target="_mcore_tp, _tp_partition_dim, _tp_duplicated of parameters",
        what="the axis along which tensor parallel ranks shard a parameter",
        why="it has no public name",
        source="distributed/fsdp/mcore_fsdp_adapter.py",
        lines=(176, None),
        when=on_accelerators("fsdp"),
        code="fsdp:fsdp_shards",
    ),
    Patch(
        target="DistributedOptimizer._init_optimizer_states_with_dummy_values",
        what="allocates the optimizer's state before a checkpoint is loaded",
        why="it has no public name",
        source="optimizer/distrib_optimizer.py",
        lines=(1137, 1422),
        when=on_accelerators("fsdp, resuming"),
        code="fsdp:init_optimizer_state",
    ),
)

PROCESS_PATCHES = (
    Patch(
        target="parallel_state._global_process_group_list, ._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
        what="process groups are destroyed when the layout changes",
        why="it only drops references to them: their threads and sockets would accumulate",
        source="parallel_state.py",
        lines=(147, 165),
        when=anywhere("tests, and live models of several layouts"),
        code="process_wide:destroy_process_groups",
    ),
    Patch(
        target="filesystem_async._results_queue",
        what="the process of the writers' results ends with the rank, and ignores SIGINT and SIGTERM",
        why="it would outlive a killed rank, and a job's SIGTERM would end it before the last checkpoint",
        source="dist_checkpointing/strategies/filesystem_async.py",
        lines=(48, 49),
        when=anywhere("every training checkpoint"),
        code="process_wide:start_results_queue",
    ),
    Patch(
        target="FileSystemWriterAsync.write_preloaded_data_multiproc",
        what="a killed writer ends the save",
        why="it waits for the results of all writers indefinitely",
        source="dist_checkpointing/strategies/filesystem_async.py",
        lines=(308, None),
        when=anywhere("every training checkpoint"),
        replaces={f"{_WRITER}.write_preloaded_data_multiproc": process.collect_from_writers},
    ),
    Patch(
        target="FileSystemWriterAsync.write_preloaded_data_multithread",
        what="the first exception of a rank's threads ends the save",
        why="it has only the class of an exception, so that a full disk is not named",
        source="dist_checkpointing/strategies/filesystem_async.py",
        lines=(None, 253),
        when=anywhere("every training checkpoint"),
        replaces={f"{_WRITER}.write_preloaded_data_multithread": process.collect_from_threads},
    ),
    Patch(
        target="FileSystemWriterAsync.write_preloaded_data",
        what="a writer's process ends with the rank",
        why="it would continue writing after the rank is killed, and wait for the rank's queue",
        source="dist_checkpointing/strategies/filesystem_async.py",
        lines=(342, None),
        when=anywhere("every training checkpoint"),
        replaces={f"{_WRITER}.write_preloaded_data": process.end_writers_with_parent},
    ),
    Patch(
        target="orig_device of MCoreTensorAwareStateDict's tensors",
        what="the device that a local checkpoint's tensors return to",
        why="it has no public name",
        source="dist_checkpointing/tensor_aware_state_dict.py",
        lines=(208, 208),
        when=anywhere("local_folder"),
        code="process_wide:original_device",
    ),
    Patch(
        target="torch, in nvidia_resiliency_ext's group_utils",
        what='the device "cuda" is the CPU while local checkpoints of other ranks are received',
        why="it receives every tensor on a GPU",
        source="dist_checkpointing/tensor_aware_state_dict.py",
        lines=(36, 36),
        when=ON_CPU,
        code="process_wide:replicas_on_cpu",
    ),
    Patch(
        target="_get_filesystem_reader, while a checkpoint is loaded",
        what="`convert.formats.dcp_reader.RestrictedReader`",
        why="torch's reader unpickles `.metadata`, which can run arbitrary code",
        source="dist_checkpointing/strategies/torch.py",
        lines=(750, 902),
        when=anywhere("every resume"),
        code="process_wide:distributed_reader",
    ),
)

PATCHES = (
    *CPU_PATCHES,
    *TORCH_ADAM_PATCHES,
    *MODULE_PATCHES,
    *OPTIMIZER_PATCHES,
    *FSDP_PATCHES,
    *PROCESS_PATCHES,
)


def is_needed(code: Callable[..., Any]) -> bool:
    """True if the row whose `code` is this function applies to the installed version of megatron-core."""
    name = f"{code.__module__.rpartition('.')[2]}:{code.__name__}"
    row = next(patch for patch in PATCHES if patch.code == name)
    return overrides.nearest_supported(overrides.installed_version()) in row.versions


def overrides_of(platform: Platform, version: str | None = None) -> Table:
    """Process-wide replacements on a platform, for a version of megatron-core (None: the installed one): those of the
    table, and the platform's own."""
    version = overrides.installed_version() if version is None else version
    met = (patch for patch in PATCHES if patch.applies(platform, version))
    return {name: make for patch in met for name, make in patch.replaces.items()} | dict(platform.overrides())


def install(platform: Platform) -> None:
    """Prepare this process for megatron-core on a platform: select the device and install the replacements, until
    `overrides.uninstall`. Calling it again is a no-op. Raises as `Platform.set_device` and `overrides.install`."""
    platform.set_device()
    overrides.install(overrides_of(platform), f"the {platform.name} platform")
