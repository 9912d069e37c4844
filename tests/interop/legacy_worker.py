"""One of two processes: megatron-core's own models load what `--format torch` wrote, strictly, rank by rank.

python -m tests.interop.legacy_worker FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

FOLDER has a Hub checkpoint and a legacy one for each of CASES. A model is built and loaded through the bridge, its
parameters are then made NaN and loaded again as Megatron-LM does; both must agree bit for bit. What Megatron-LM would
save of it is written beside, for the test to read back.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from dlm_bridge import Bridge, Layout
from tests.processes import work

# Model of tests.interop.cases -> layout on two processes.
CASES: dict[str, Layout] = {
    "odd_vocabulary": Layout(tp=2),
    "tied": Layout(pp=2, vp=2),
    "rnd1": Layout(ep=2),
    "llada2_moe": Layout(ep=2),
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    work(folder, ((name, partial(check, folder, name)) for name in CASES))
    dist.destroy_process_group()


def check(folder: Path, name: str) -> None:
    from dlm_bridge.parallel import groups
    from dlm_bridge.parallel.parallelize import build_megatron_model

    layout = CASES[name]
    rank = int(os.environ["RANK"])
    groups.destroy()
    chunks = build_megatron_model(Bridge.from_hf(folder / "hub" / name).checkpoint, layout)
    place = {"tp": f"{rank:02d}", "pp": f"00_{rank:03d}", "ep": f"00_{rank:03d}"}
    kind = "tp" if layout.tp > 1 else "pp" if layout.pp > 1 else "ep"
    file = f"iter_0000000/mp_rank_{place[kind]}/model_optim_rng.pt"
    content = torch.load(folder / "legacy" / name / file, weights_only=False)
    keys = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    for key, chunk in zip(keys, chunks, strict=True):
        wanted = {part: tensor.clone() for part, tensor in chunk.named_parameters()}
        with torch.no_grad():
            for tensor in chunk.parameters():
                tensor.fill_(float("nan"))
        chunk.load_state_dict(content[key], strict=True)
        for part, tensor in chunk.named_parameters():
            assert torch.equal(tensor, wanted[part]), f"{name}: {part}"
        content[key] = chunk.state_dict_for_save_checkpoint()
    target = folder / "again" / name / file
    target.parent.mkdir(parents=True)
    torch.save({"checkpoint_version": 3.0, "iteration": 0, "args": content["args"], **_models(content)}, target)


def _models(content: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in content.items() if key.startswith("model")}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
