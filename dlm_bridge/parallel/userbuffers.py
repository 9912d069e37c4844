"""Transformer Engine's userbuffers: tensor parallel communication beside the matrix products that it belongs to.

With them (`TransformerConfig.tp_comm_overlap`) a linear layer gathers its input, or reduces its output, piece by piece
while it multiplies the other pieces. Each kind of product has a buffer of one micro-batch's hidden states. Layers look
for the buffers when they are built, and products take their sizes from them: every micro-batch, of an evaluation too,
has the number of tokens that they were made for. Sums are in bf16, whatever a buffer's dtype.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import NotInstalledError

SKIP_MULTICAST = "UB_SKIPMC"  # Transformer Engine's variable: 1 for CUDA IPC in place of NVLink multicast


def check_machine(tp: int) -> None:
    """Raise NotInstalledError where Transformer Engine is not used, DlmBridgeError where tensor parallel ranks are of
    several nodes."""
    if not platform.current().uses_transformer_engine():
        raise NotInstalledError("--tp-overlap needs Transformer Engine and GPUs: pip install 'dlm-bridge[te]'")
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    if local.isdecimal() and int(local) % tp:
        raise DlmBridgeError(
            f"--tp-overlap: ranks of --tp {tp} must be of one node, and a node has {local} processes: change --tp, or "
            "leave it out"
        )


def initialize(tokens: int, hidden_size: int, tp: int, fp8: bool, mixed: bool, backend: str) -> None:
    """Make the buffers, in place of earlier ones, for hidden states [tokens, hidden_size] of a context parallel rank's
    micro-batch. Every process calls it. `fp8`: of layers in FP8; `mixed`: of others in bf16 besides. `backend`: of
    torch.distributed, by which ranks exchange addresses. Raises DlmBridgeError."""
    from transformer_engine.pytorch.module import base

    destroy()
    if os.environ.get("NCCL_NVLS_ENABLE") == "0":  # this machine's multicast is not to be used
        os.environ.setdefault(SKIP_MULTICAST, "1")
    mode = base.UserBufferQuantizationMode
    modes = [mode.FP8 if fp8 else mode.NONE] + [mode.NONE] * (fp8 and mixed)
    try:
        base.initialize_ub([tokens, hidden_size], tp, quantization_modes=modes, bootstrap_backend=backend)
    except RuntimeError as error:  # of the driver, or of CUDA IPC in a container
        raise DlmBridgeError(f"--tp-overlap: this machine has no userbuffers: {one_line(error)}") from error


def destroy() -> None:
    """Free the buffers, where there are any. Other ranks must have used them for the last time: the last step's sums
    over all ranks have been read, or the process ends."""
    base: Any = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is not None and base.is_ub_initialized():
        platform.current().synchronize()
        base.destroy_ub()
