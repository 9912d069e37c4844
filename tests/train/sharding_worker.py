"""The processes that FSDP's checks run in, all forked from one that has imported what they need.

python -m tests.train.sharding_worker FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlm_bridge.convert import streaming
from dlm_bridge.errors import DlmBridgeError, LayoutError
from dlm_bridge.loading.lazy import NotInRangesError
from dlm_bridge.loading.source import ModelSource
from dlm_bridge.train.accelerate import fsdp, trainer
from dlm_bridge.train.accelerate.fsdp import full_tensor
from dlm_bridge.train.accelerate.optimizers import MuonAndAdamW
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.setup import model_source, starting_model
from tests.processes import fork
from tests.refusals import refused
from tests.train.conftest import undrawn

SUBJECTS = ("masked", "block", "causal", "tied", "experts")
STEPS = 3
MUON_APART = 2e-4  # its updates are rounded to bf16, so that what rounds gradients apart changes some by one bit
OPTIONS: dict[str, Any] = {
    "task": "sft",
    "from_scratch": True,
    "length_variation": 0.0,
    "warmup_steps": 0,
    "lr_schedule": "constant",
    "lr": 1e-3,
    "seq_length": 96,
    "global_batch_size": 4,
    "micro_batch_size": 1,
    "save_interval": 0,
    "save_steps": "1",  # so that what goes on from there shows its optimizer's state in the last loss
    "eval_interval": 3,
    "norm_interval": 2,
    "split": "75,25,0",
}

Check = tuple[str, Callable[[], None]]


# Checks that repeat a claim with another model, optimizer or adapter: `make test` leaves them out.
REPEATED = {
    1: ("causal", "DoRA", "an adapter of experts"),
    2: (
        *("block", "block, saved", "causal", "causal, saved", "tied", "tied, saved", "DoRA", "an adapter of experts"),
        *("an adapter of experts goes on from one process", "DoRA goes on from one process"),
        *("muon goes on from one process", "experts in parts", "goes on, not cut"),
    ),
    4: (),
}


def names(processes: int, repeated: bool) -> list[str]:
    """The checks of `REPEATED`, or the others."""
    return [name for name, _ in checks(Path(), processes) if (name in REPEATED[processes]) == repeated]


def checks(root: Path, processes: int) -> Iterator[Check]:
    """In order; later ones read what earlier ones wrote, those of more processes what those of fewer wrote."""
    if processes == 1:
        for subject in SUBJECTS:
            yield subject, partial(train, root, f"{subject}-1", subject)
        yield "an adapter", partial(train, root, "adapter-1", "masked", **_adapter(root))
        yield "DoRA", partial(train, root, "dora-1", "masked", **_adapter(root), lora_dora=True)
        yield "an adapter of experts", partial(train, root, "stacks-1", "masked", **_expert_adapter(root))
        yield "muon", partial(train, root, "muon-1", "masked", optimizer="muon")
        yield "averaged", partial(train, root, "averaged-1", "masked", ema_decay=0.5)
        yield "one process can be cut", partial(equals, root, "masked", "alone", sharding="fsdp", cpu_offload=True)
        return
    for subject in SUBJECTS if processes == 2 else SUBJECTS[:1]:
        name = f"{subject}-{processes}"
        yield subject, partial(equals, root, subject, name, sharding="fsdp")
        yield f"{subject}, saved", partial(is_saved, root, subject, name)
    if processes == 4:
        yield "replicas", partial(equals, root, "masked", "replicas-4", sharding="fsdp", fsdp_replicas=2)
        yield "replicas, saved", partial(is_saved, root, "masked", "replicas-4")
        yield "replicas, averaged", partial(replicas_averaged, root)
        yield "goes on, replicas", partial(goes_on, root, "masked-2", sharding="fsdp", fsdp_replicas=2)
        yield "three replicas of four processes", partial(refuses_replicas, root)
    yield "goes on, cut by two", partial(goes_on, root, "masked-2", sharding="fsdp")
    if processes == 2:
        more = {"sharding": "fsdp", "gradient_checkpointing": True, "cpu_offload": True}
        yield "recomputed and offloaded", partial(equals, root, "block", "more-2", **more)
        yield "data parallel", partial(equals, root, "masked", "ddp-2")
        yield "an adapter", partial(adapter_equals, root, "adapter")
        yield "DoRA", partial(adapter_equals, root, "dora", lora_dora=True)
        yield "an adapter of experts", partial(adapter_equals, root, "stacks", **_expert_adapter(root))
        more = {**more, **_expert_adapter(root)}
        yield "an adapter of experts goes on from one process", partial(goes_on, root, "stacks-1", **more)
        dora = {**_adapter(root), "lora_dora": True}
        yield "DoRA goes on from one process", partial(goes_on, root, "dora-1", sharding="fsdp", **dora)
        muon = {"sharding": "fsdp", "optimizer": "muon", "apart": MUON_APART}
        yield "muon", partial(equals, root, "masked", "muon-2", "muon-1", **muon)
        yield "muon goes on from one process", partial(goes_on, root, "muon-1", **muon)
        yield "averaged", partial(averages_equal, root)
        yield "half precision", partial(half_precision, root)
        for subject in ("tied", "experts"):
            yield f"{subject} in parts", partial(reads_its_shards, root, subject)
        yield "as one that is read whole", partial(equals_one_read_whole, root)
        yield "another checkpoint on one node", partial(refuses_another_checkpoint, root)
        yield "goes on from one process", partial(goes_on, root, "masked-1", sharding="fsdp")
        yield "goes on, not cut", partial(goes_on, root, "masked-2")


def train(root: Path, name: str, subject: str, resume: bool = False, **changes: Any) -> None:
    """Run, and keep the gradients of the first step."""
    AcceleratorState._reset_state(reset_partial_state=True)
    options = {**OPTIONS, "steps": STEPS, "model": str(root / subject), "data": [str(root / "chats.jsonl")], **changes}
    config = TrainConfig.from_flags(**options, output=str(root / name), tokenizer=str(root / "tokenizer"))
    kind: Any = MuonAndAdamW if config.optimizer.optimizer == "muon" else torch.optim.AdamW
    step = kind.step
    kept: list[list[torch.Tensor]] = []

    def keeping(self: Any, *arguments: Any, **more: Any) -> Any:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        if not kept and not resume:
            kept.append([full_tensor(weight.grad, torch.device("cpu")).clone() for weight in weights])
        return step(self, *arguments, **more)

    with mock.patch.object(kind, "step", keeping):
        trainer.train(config, resume, Console(quiet=True))
    if kept and os.environ["RANK"] == "0":
        torch.save(kept[0], root / f"{name}.pt")


def equals(root: Path, subject: str, name: str, like: str | None = None, apart: float = 1e-5, **changes: Any) -> None:
    """Loss, validation and norm of every step, and every gradient of the first, are those of one process. `apart` is
    the relative difference that the steps may have."""
    train(root, name, subject, **changes)
    like = like or f"{subject}-1"
    for row, expected in zip(rows(root, name), rows(root, like), strict=True):
        for key in ("loss", "grad_norm", "eval_loss"):
            if key in expected:
                assert abs(row[key] / expected[key] - 1) < apart, (row["step"], key, row[key], expected[key])
        for key in ("param_norm", "layer_grad_norms"):
            assert (key in row) == (key in expected) == (row["step"] == 2)
            if key in row:
                assert row[key] == pytest.approx(expected[key], rel=1e-4), (key, row, expected)
    if os.environ["RANK"] == "0":
        found, wanted = (torch.load(root / f"{each}.pt") for each in (name, like))
        assert len(found) == len(wanted) > 10
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max(), (one.shape, one - other)


def is_saved(root: Path, subject: str, name: str) -> None:
    """The checkpoint has the files, keys, dtypes and, but for rounding, the values of the one that transformers
    wrote."""
    ours, theirs = (root / each / f"checkpoints/step-{STEPS:07d}" for each in (name, f"{subject}-1"))
    listed = [{path.name for path in folder.iterdir()} for folder in (ours, theirs)]
    assert listed[0] == listed[1] | {"optimizer"}, listed
    for file in ("config.json", "generation_config.json"):
        if (theirs / file).exists():
            assert (ours / file).read_text() == (theirs / file).read_text()
    found, wanted = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype
        assert torch.allclose(found[key], tensor, atol=2e-4), key  # Adam's first steps go by signs


def adapter_equals(root: Path, kind: str, **changes: Any) -> None:
    equals(root, "masked", f"{kind}-2", f"{kind}-1", sharding="fsdp", **{**_adapter(root), **changes})
    found, wanted = (
        load_file(root / name / f"checkpoints/step-{STEPS:07d}/adapter_model.safetensors")
        for name in (f"{kind}-2", f"{kind}-1")
    )
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[key], tensor, atol=2e-4) for key, tensor in wanted.items())
    settings = [
        json.loads((root / name / f"checkpoints/step-{STEPS:07d}/adapter_config.json").read_text())
        for name in (f"{kind}-2", f"{kind}-1")
    ]
    assert {**settings[0], "target_modules": 0} == {**settings[1], "target_modules": 0}


def averages_equal(root: Path) -> None:
    """Of a run that is cut, and of one that goes on from one process's step 1."""
    equals(root, "masked", "averaged-2", "masked-1", sharding="fsdp", ema_decay=0.5)
    resumed = goes_on(root, "averaged-1", sharding="fsdp", ema_decay=0.5)
    wanted, *others = (
        load_file(root / name / f"checkpoints/step-{STEPS:07d}/ema/model.safetensors")
        for name in ("averaged-1", "averaged-2", resumed)
    )
    for found in others:
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[key], tensor, atol=2e-4) for key, tensor in wanted.items())


def replicas_averaged(root: Path) -> None:
    changes = {"sharding": "fsdp", "fsdp_replicas": 2, "ema_decay": 0.5, "gradient_checkpointing": True}
    equals(root, "masked", "averaged-4", "masked-1", **changes)
    found, wanted = (
        load_file(root / name / f"checkpoints/step-{STEPS:07d}/ema/model.safetensors")
        for name in ("averaged-4", "averaged-1")
    )
    assert all(torch.allclose(found[key], tensor, atol=2e-4) for key, tensor in wanted.items())


def refuses_replicas(root: Path) -> None:
    with refused(LayoutError, "fsdp_replicas", "4 processes"):
        train(root, "three", "masked", sharding="fsdp", fsdp_replicas=3)


def half_precision(root: Path) -> None:
    """Layers are gathered in bf16, routers in fp32; what is saved is fp32."""
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMLP, Glm4MoeTopkRouter

    seen: dict[type, set[torch.dtype]] = {Glm4MoeTopkRouter: set(), Glm4MoeMLP: set()}

    def watched(kind: type) -> Any:
        forward = kind.forward  # type: ignore[attr-defined]

        def _forward(self: Any, *arguments: Any) -> Any:
            seen[kind].add(next(self.parameters()).dtype)
            return forward(self, *arguments)

        return mock.patch.object(kind, "forward", _forward)

    with watched(Glm4MoeTopkRouter), watched(Glm4MoeMLP):
        train(root, "half", "experts", sharding="fsdp", precision="bf16")
    assert seen == {Glm4MoeTopkRouter: {torch.float32}, Glm4MoeMLP: {torch.bfloat16}}
    found, exact = ([row["loss"] for row in rows(root, name)] for name in ("half", "experts-1"))
    assert found != exact
    assert all(abs(one / other - 1) < 0.02 for one, other in zip(found, exact, strict=True))
    saved = load_file(root / f"half/checkpoints/step-{STEPS:07d}/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def reads_its_shards(root: Path, subject: str) -> None:
    """A process reads the bytes of its shards, and holds no more than them and as much again as the largest tensor;
    the shards are those of the model that is loaded whole."""
    folder = root / f"{subject}-1/checkpoints/step-{STEPS:07d}"
    config = TrainConfig.from_flags(model=str(folder), data=["mock"], output="o", sharding="fsdp")
    with CountedReads() as read, AllocatedMemory() as memory:
        starting = starting_model(config, None, main=torch.distributed.get_rank() == 0)
        model = starting.model
        assert all(weight.is_meta for weight in model.parameters())
        fsdp.shard_model(model, starting.weights, config, torch.device("cpu"))
    wanted = model_source(config).load()
    own = largest = 0
    for (name, weight), whole in zip(model.named_parameters(), wanted.parameters(), strict=True):
        shard, size = weight.to_local(), -(-len(whole) // 2)
        start = size * torch.distributed.get_rank()
        assert torch.equal(shard, whole[start : start + size]), name
        own, largest = own + shard.nbytes, max(largest, whole.nbytes)
    stored = model.state_dict().keys()
    held = 0
    for (name, buffer), expected in zip(model.named_buffers(), wanted.buffers(), strict=True):
        assert torch.equal(buffer, expected), name
        held += buffer.nbytes
        own += buffer.nbytes * (name in stored)
    assert read.nbytes == own
    total = sum(weight.nbytes for weight in wanted.parameters())
    assert own < 0.55 * total
    assert memory.peak <= 1.01 * (own + held + largest) < 0.8 * total, (memory.peak, own, held, largest, total)


def equals_one_read_whole(root: Path) -> None:
    """Losses, gradients and saved weights, bit for bit."""
    for name in ("parts", "whole"):
        with contextlib.ExitStack() as stack:
            if name == "whole":
                refusing = mock.Mock(side_effect=NotInRangesError("so that the first process reads it"))
                stack.enter_context(mock.patch.object(ModelSource, "_lazy", refusing))
            train(root, name, "weights", sharding="fsdp", from_scratch=False)
            assert name == "parts" or refusing.called
    for found, wanted in zip(rows(root, "parts"), rows(root, "whole"), strict=True):
        for key in ("loss", "grad_norm", "eval_loss"):
            assert found.get(key) == wanted.get(key), key
    if os.environ["RANK"] == "0":
        grads, others = (torch.load(root / f"{name}.pt") for name in ("parts", "whole"))
        assert all(torch.equal(one, other) for one, other in zip(grads, others, strict=True))
        saved, expected = (
            load_file(root / name / f"checkpoints/step-{STEPS:07d}/model.safetensors") for name in ("parts", "whole")
        )
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[key], tensor) for key, tensor in expected.items())


def refuses_another_checkpoint(root: Path) -> None:
    folder = root / ("weights" if os.environ["RANK"] == "0" else f"tied-1/checkpoints/step-{STEPS:07d}")
    config = TrainConfig.from_flags(model=str(folder), data=["mock"], output="o", sharding="fsdp")
    starting = starting_model(config, None, main=True)
    with pytest.raises(DlmBridgeError, match="rank 1"):
        fsdp.shard_model(starting.model, starting.weights, config, torch.device("cpu"))


class CountedReads:
    """The bytes of tensors that are read from files."""

    def __enter__(self) -> CountedReads:
        self.nbytes, real = 0, streaming.read_at

        def count(fd: int, path: Path, offset: int, view: memoryview) -> None:
            self.nbytes += len(view)
            real(fd, path, offset, view)

        self._patch = mock.patch.object(streaming, "read_at", count)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


class AllocatedMemory(TorchDispatchMode):
    """The most bytes that tensors on the CPU had at once, of those made since it began."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._live[reference.cdata] = reference, storage.nbytes()
        self._live = {place: entry for place, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def goes_on(root: Path, source: str, apart: float = 1e-5, **changes: Any) -> str:
    """From step 1 of another run, cut otherwise, to the losses of one that went through. The run's name."""
    layout = f"{changes.get('sharding')}{changes.get('fsdp_replicas', '')}"
    name = f"{source}-resumed-{os.environ['WORLD_SIZE']}-{layout}"
    if os.environ["RANK"] == "0":
        shutil.copytree(root / source, root / name, ignore=shutil.ignore_patterns(f"step-{STEPS:07d}"))
    torch.distributed.barrier()
    train(root, name, "masked", resume=True, **changes)
    found, wanted = rows(root, name), rows(root, f"{source.split('-')[0]}-1")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row, expected in zip(found, wanted, strict=True):
        assert abs(row["loss"] / expected["loss"] - 1) < apart, (row, expected)
    return name


def rows(root: Path, name: str) -> list[dict[str, Any]]:
    torch.distributed.is_initialized() and torch.distributed.barrier()
    return [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]


def _adapter(root: Path) -> dict[str, Any]:
    return {"model": str(root / "weights"), "from_scratch": False, "lora_rank": 4}


def _expert_adapter(root: Path) -> dict[str, Any]:
    """Of a model that a run has saved."""
    model = str(root / f"experts-1/checkpoints/step-{STEPS:07d}")
    return {**_adapter(root), "model": model, "lora_targets": "o_proj,experts"}


def main(root: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    undrawn(pytest.MonkeyPatch())
    datasets.config.HF_DATASETS_CACHE = root / "cache"
    worlds, every = json.loads((root / "worlds.json").read_text())

    def chosen(processes: int) -> Iterator[Check]:
        return (check for check in checks(root, processes) if every or check[0] not in REPEATED[processes])

    for processes in worlds:
        fork(root / f"reports-{processes}", processes, partial(chosen, processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
