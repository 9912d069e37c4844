"""FP8 products in the decoder layers, by torchao: weights and activations are scaled per tensor, as they come."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.speed.layers import decoder_layers

NEEDED = (8, 9)  # compute capability of the first GPUs with FP8 products


def check_float8() -> None:
    """Raise DlmBridgeError where `--precision fp8` cannot run."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < NEEDED:
        raise DlmBridgeError("--precision fp8 needs an NVIDIA GPU of compute capability 8.9 or later: use bf16")
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise DlmBridgeError(
            "--precision fp8 of --engine accelerate needs torchao: pip install 'dlm-bridge[fp8]'"
        ) from error


def convert_to_float8(model: nn.Module, emulate: bool = False) -> int:
    """Let the linear layers of every decoder layer multiply in FP8, and return how many do: all whose sizes are
    multiples of 16, as the products want, but for routers. Weights stay what they are. With `emulate` the products
    are of rounded numbers in half precision, on any device. Call it before `compile_layers`."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, name: str) -> bool:
        linear: Any = module
        return linear.in_features % 16 == 0 and linear.out_features % 16 == 0 and name.split(".")[-1] != "gate"

    config = Float8LinearConfig(emulate=emulate)
    for layer in decoder_layers(model):
        convert_to_float8_training(layer, module_filter_fn=fits, config=config)
    return sum(type(module).__name__ == "Float8Linear" for module in model.modules())
