"""One of the processes whose layers have the kernels of `parallel.fused`, in Triton's interpreter.

python -m tests.parallel.fused_worker FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TRITON_INTERPRET set
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.parallel.live_cases import Files
from tests.parallel.live_worker import loss_and_gradients_match
from tests.processes import work

# Grouped queries, and norms of heads that are rotated in part; in layouts that cut heads, rows and layers.
CASES = ("tied-tp2-sp", "tied-pp2-vp2", "moe-ep2-tp2-sp", "shared-experts-ep2-pp2")


def main(root: Path) -> None:
    from dlm_bridge.parallel.fused import qk_norm_rope
    from dlm_bridge.parallel.platform import Platform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Platform, "uses_fused_kernels", lambda self: True)
        patch.setattr(qk_norm_rope, "ROWS", 128)  # the interpreter takes as long for a small program
        work(root, [(name, partial(loss_and_gradients_match, Files(root), name)) for name in CASES])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
