"""One of the processes of the proof of context parallelism.

torchrun --nproc-per-node 2 -m tests.parallel.context_worker FOLDER      on GPUs also every communication type
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parallel.context_cases import cases, context_models, hub
from tests.processes import work


def names() -> list[str]:
    """Every check, on two processes on CPU."""
    return [name for name, _ in _checks(Path(), {}, 2, engine=False)]


def main(root: Path) -> None:
    from dlm_bridge import Layout
    from dlm_bridge.parallel import groups
    from dlm_bridge.parallel.layer_spec import uses_transformer_engine

    torch.set_num_threads(1)
    groups.initialize(Layout())
    if dist.get_rank() == 0:
        for name, model in context_models().items():
            if not hub(root, name).exists():
                model.write(hub(root, name))
    dist.barrier()
    said: dict[str, str] = {}
    work(root, _checks(root, said, dist.get_world_size(), uses_transformer_engine()))
    if dist.get_rank() == 0:
        for name, apart in said.items():
            print(f"{name:64} {apart}")
    dist.destroy_process_group()


def _checks(root: Path, said: dict[str, str], ranks: int, engine: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    of_kind = {case.name: case for case in cases()}

    def cut_equals_whole(name: str, comm_type: str, sizes: tuple[int, ...] | None = None) -> None:
        from tests.parallel import context_checks

        said[f"{name} {comm_type}"] = context_checks.cut_equals_whole(root, of_kind[name], comm_type, sizes)

    def other(name: str, *of: str) -> None:
        from tests.parallel import context_checks

        getattr(context_checks, name)(root, *(of_kind[case] for case in of))

    for name in of_kind:
        default = "allgather" if name.startswith("window") else "p2p"
        yield f"cp[{name}]", partial(cut_equals_whole, name, default)
        if engine and not of_kind[name].has_codes:
            if ranks == 2:
                yield f"a2a[{name}]", partial(cut_equals_whole, name, "a2a")
            if default == "p2p":
                yield f"allgather[{name}]", partial(cut_equals_whole, name, "allgather")
            if ranks == 4 and default == "p2p":
                yield f"a2a+p2p[{name}]", partial(cut_equals_whole, name, "a2a+p2p", (2, 2))
    if ranks == 2:
        flight = ("wedlm-WeDLMDiffusion-packed", "wedlm-WeDLMDiffusion-plain")
        yield "micro_batches_in_flight", partial(other, "micro_batches_in_flight", *flight)
    if not engine:
        refused = ("gqa-MaskedDiffusion-plain", "window-NextTokenPrediction-plain", "sdar-BlockDiffusion-plain")
        yield "refusals", partial(other, "what_cannot_be_is_refused", *refused)
        yield "ignored", partial(other, "what_would_be_ignored_is_refused", "gqa-MaskedDiffusion-packed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
