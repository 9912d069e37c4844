"""All names that the engine imports from megatron-core, the check of its version, and its errors as one line each."""

# ruff: noqa: F401 (other modules import these names from here)
from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import traceback
import warnings
from collections.abc import Iterator

from dlm_bridge.errors import DlmBridgeError, MissingExtraError, SettingError, one_line
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.overrides import MEGATRON_CORE, check_version, installed_version

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    raise MissingExtraError(MEGATRON_CORE, "is not installed: pip install 'dlm-bridge[megatron]'")


def hide_gpu_packages() -> None:
    """Make imports of Transformer Engine and apex fail in this process, as if they were not installed."""
    sys.modules.update(dict.fromkeys(("transformer_engine", "apex")))  # type: ignore[arg-type]


if isinstance(platform.current(), platform.CPU):
    hide_gpu_packages()  # a row of `mcore_patches`, but megatron-core looks for them when it is imported

version = installed_version()
check_version(version)  # once per process: everything that uses megatron-core imports it from here

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional packages (apex, transformer-engine)
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import (
            LocalNonpersistentObject,
            ShardedBase,
            ShardedObject,
            ShardedTensor,
            ShardedTensorFactory,
            is_main_replica,
        )
        from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
        from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
        from megatron.core.fusions.fused_bias_geglu import quick_gelu
        from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
            _yarn_get_concentration_factor_from_config as concentration_factor,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_local_spec,
            get_gpt_layer_with_transformer_engine_spec,
        )
        from megatron.core.optimizer import (
            OptimizerConfig,
            get_megatron_optimizer,
            get_standard_config_overrides,
        )
        from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import layers as tensor_parallel_layers
        from megatron.core.tensor_parallel.layers import (
            ColumnParallelLinear,
            RowParallelLinear,
            param_is_not_tensor_parallel_duplicate,
            set_tensor_model_parallel_attributes,
        )
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
            reduce_from_tensor_model_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.attention import SelfAttention
        from megatron.core.transformer.enums import AttnBackend, AttnMaskType
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
        from megatron.core.transformer.module import MegatronModule, param_is_not_shared
        from megatron.core.transformer.moe.moe_utils import permute
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
        from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
        from megatron.core.transformer.multi_token_prediction import (
            MultiTokenPredictionBlockSubmodules,
            MultiTokenPredictionLayer,
            MultiTokenPredictionLayerSubmodules,
        )
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
        from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
        from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
        from megatron.core.utils import (
            make_sharded_tensor_for_checkpoint,
            make_tp_sharded_tensor_for_checkpoint,
            unwrap_model,
        )
except ImportError as error:
    raise MissingExtraError(MEGATRON_CORE, f"{version} cannot be used: {one_line(error)}") from error

# What `build_module` appends to the message of any exception; a KeyError's is in quotes.
_BUILD_MODULE = re.compile(r" when instantiating \w+['\"]?$")


@contextlib.contextmanager
def named_refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Context manager that raises megatron-core's refusals of a configuration as errors of one line.

    Args:
        kinds: the exceptions that are refusals; all exceptions if none is given.

    Raises:
        SettingError: its field is megatron-core.
        MissingExtraError: a package is missing.
    """
    try:
        yield
    except Exception as raised:
        error = _original(raised)
        if isinstance(error, DlmBridgeError):
            if error is raised:
                raise
            raise error from None
        if not isinstance(error, kinds or Exception):
            raise
        missing = isinstance(error, ImportError | RuntimeError) or "install" in str(error)
        refusal = MissingExtraError if missing else SettingError
        raise refusal(MEGATRON_CORE, f"refuses this configuration: {_reason(error)}") from error


def _original(error: BaseException) -> BaseException:
    """The exception that `build_module` replaced, once for each module around it, by one of its class made from the
    message alone; a TypeError stands for a class that cannot be made so."""
    while (context := error.__context__) is not None and (
        _BUILD_MODULE.search(str(error)) or (isinstance(error, TypeError) and isinstance(context, DlmBridgeError))
    ):
        error = context
    return error


def _reason(error: BaseException) -> str:
    """The message, or the source line of an assertion without a message."""
    if isinstance(error, KeyError):
        return f"it does not know {one_line(error)}"
    if str(error):
        return one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line if frames else None) or one_line(error)
