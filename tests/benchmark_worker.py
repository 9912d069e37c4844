"""A benchmark's process on a machine without its GPUs. Usage: benchmark_worker.py SCRIPT ARGUMENTS, with a leading
--cuda where the script takes its device for a GPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from tests import cuda_standin

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# Settings of the peer's model that only Transformer Engine's kernels can follow, or that take a compiler.
WITHOUT_KERNELS = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
}


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[0] == "--cuda":
        cuda_standin.install()
        arguments = arguments[1:]
    script = BENCHMARKS / arguments[0]
    if script.name == "train.py":
        megatron_without_transformer_engine()
    if script.name == "attention.py":
        torch.bfloat16 = torch.float16  # type: ignore[misc]  # which Triton's interpreter computes in
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments[1:]]
    runpy.run_path(str(script), run_name="__main__")


def megatron_without_transformer_engine() -> None:
    """megatron-core's own layers in the place of Transformer Engine's."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.moe import moe_utils

    from dlm_bridge.parallel import config

    described = config.model_config

    def model_config(*args: Any, **settings: Any) -> Any:
        return described(*args, **settings | (WITHOUT_KERNELS if "cross_entropy_fusion_impl" in settings else {}))

    def local_spec(num_experts: int | None, moe_grouped_gemm: bool, qk_layernorm: bool) -> Any:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(num_experts, False, qk_layernorm, normalization="RMSNorm")
        if num_experts is not None:  # as in Transformer Engine's, the norm is not one with the dense layer behind it
            del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        return spec

    moe_utils.te_general_gemm = None  # undefined without Transformer Engine
    config.model_config = model_config
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = local_spec


if __name__ == "__main__":
    main()
