"""The processes for checks of reinforcement learning in the Megatron engine, forked from one that has imported it.

python -m tests.rl.megatron_worker FOLDER PART
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from dlm_bridge import Bridge
from dlm_bridge.convert.checkpoints.in_memory import hub_tensors
from dlm_bridge.errors import SettingError
from dlm_bridge.parallel.handover import stream_live_weights
from dlm_bridge.parallel.mcore_patches.fsdp import unwrapped
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import PREFERRED
from dlm_bridge.train.rl.accelerate_engine import AccelerateUpdates, train
from dlm_bridge.train.rl.megatron_engine import MegatronUpdates
from dlm_bridge.train.rl.rollout import Rollouts
from tests.groups import make_way
from tests.parallel.test_megatron_lora import factors
from tests.processes import fork
from tests.refusals import refused
from tests.rl.sharding_worker import METHODS, OPTIONS, STEPS, rows, same_rows

# Adam's steps of gradients that are next to nothing are noise, but for an epsilon that is larger than they are.
SMOOTH = {"adam_eps": 1e-2, "lr": 1e-2}
VALUED = {**METHODS["value-model"], "value_lr": 5e-2}  # by which all layers move
ONE_STEP = {"steps": 1, "eval_interval": 0, "save_steps": None}
SUBJECTS: dict[str, dict[str, Any]] = {
    **{name: {"method": name, **options} for name, options in METHODS.items()},
    "blocks": {"method": "block-grpo", **METHODS["block-grpo"]},  # of a block-causal model, in two streams
    "traced blocks": {"method": "tracerl", **METHODS["tracerl"], "trace_steps": 1},
    "experts": {"method": "diffu-grpo", **METHODS["diffu-grpo"]},
    "blocks of experts": {"method": "block-grpo", **METHODS["block-grpo"]},
    "traced experts": {"method": "tracerl", **METHODS["tracerl"], "seed": 7},  # at which the rewards of groups differ
    "one-step": {"method": "diffu-grpo", **METHODS["diffu-grpo"], **ONE_STEP},
    "value-model": VALUED,
    "value step": {**VALUED, **ONE_STEP},
    "valued blocks": {**VALUED, "trace_steps": 1},
    "valued experts": {**VALUED, "seed": 7},
    # Continued, from folders of PEFT's; and one that begins, whose initial values are an engine's own.
    "adapter": {"method": "diffu-grpo", **METHODS["diffu-grpo"], "adapter": "lora"},
    "preferred adapter": {"method": "vrpo", **METHODS["vrpo"], "adapter": "dora"},
    "adapter of experts": {"method": "diffu-grpo", **METHODS["diffu-grpo"], "adapter": "expert-lora"},
    "new adapter": {"method": "diffu-grpo", **METHODS["diffu-grpo"], "lora_rank": 2},
}
MODELS = {
    "blocks": "blocks", "traced blocks": "blocks", "experts": "experts", "blocks of experts": "experts",
    "traced experts": "experts", "one-step": "tied", "grpo": "causal", "dpo": "causal",
    "adapter of experts": "experts", "value step": "tied", "valued blocks": "blocks", "valued experts": "experts",
}  # fmt: skip
UNSHARDED = {"distributed_optimizer": False}  # every rank then has all gradients
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": False},
    "pp2": {"pp": 2},
    "dp2": UNSHARDED,
    "tp2-sp": {"tp": 2},
    "pp2-vp2": {"pp": 2, "vp": 2},
    "cp2": {"cp": 2, **UNSHARDED},
    "ep2": {"ep": 2, **UNSHARDED},
    "dp2-zero": {},
    "tp2-sp-pp2": {"tp": 2, "pp": 2},
    "tp2-sp-cp2": {"tp": 2, "cp": 2, **UNSHARDED},
    "pp2-dp2": {"pp": 2, **UNSHARDED},
    # Ranks that sample from one model: of one replica of the trained model, and of two.
    "tp2, shared": {"tp": 2, "sequence_parallel": False, "rollout_tp": 2},
    "dp2, shared": {**UNSHARDED, "rollout_tp": 2},
    "ep2, shared": {"ep": 2, **UNSHARDED, "rollout_tp": 2},
    "tp2-sp-pp2, shared": {"tp": 2, "pp": 2, "rollout_tp": 4},
    "pp2-dp2, shared": {"pp": 2, **UNSHARDED, "rollout_tp": 2},
}
# By part, of which each is a run of its own, and by the number of processes: the subjects of each layout.
PARTS: dict[str, dict[int, dict[str, tuple[str, ...]]]] = {
    "quick": {2: {"tp2": ("one-step",), "pp2": ("value step",)}},
    "diffusion": {
        2: {
            "tp2": ("diffu-grpo", "tracerl", "vrpo", "blocks"),
            "pp2": ("block-grpo", "traced blocks", "vrpo", "experts", "one-step"),
            "dp2": ("diffu-grpo", "block-grpo", "tracerl", "vrpo"),
            "tp2-sp": ("diffu-grpo", "blocks", "experts"),
            "pp2-vp2": ("diffu-grpo", "block-grpo", "tracerl", "vrpo"),
            "cp2": ("diffu-grpo", "tracerl", "traced blocks", "vrpo", "blocks"),
            "ep2": ("experts", "blocks of experts", "traced experts"),
            "dp2-zero": ("diffu-grpo",),
        },
        4: {"tp2-sp-pp2": ("block-grpo", "vrpo"), "tp2-sp-cp2": ("blocks",), "pp2-dp2": ("diffu-grpo",)},
    },
    "values": {
        2: {
            "tp2": ("value-model", "valued blocks", "value step"),
            "pp2": ("value-model", "value step"),
            "dp2": ("value-model",),
            "tp2-sp": ("value-model", "valued experts"),
            "pp2-vp2": ("value-model",),
            "cp2": ("value-model", "valued blocks"),
            "ep2": ("valued experts",),
            "dp2-zero": ("value-model",),
        },
        4: {"tp2-sp-pp2": ("value-model",), "tp2-sp-cp2": ("valued blocks",), "pp2-dp2": ("value-model",)},
    },
    "others": {
        2: {
            "tp2": ("grpo", "dpo", "preferred adapter", "new adapter"),
            "pp2": ("grpo", "dpo", "adapter"),
            "dp2": ("grpo", "dpo", "adapter"),
            "tp2-sp": ("grpo", "adapter"),
            "pp2-vp2": ("dpo",),
            "cp2": ("grpo", "dpo", "adapter"),
            "ep2": ("adapter of experts",),
            "tp2, shared": ("diffu-grpo", "blocks", "grpo", "adapter"),
            "dp2, shared": ("diffu-grpo",),
            "ep2, shared": ("experts", "adapter of experts"),
        },
        4: {
            "tp2-sp-pp2": ("grpo", "adapter"),
            "pp2-dp2": ("dpo", "new adapter"),
            "tp2-sp-pp2, shared": ("diffu-grpo",),
            "pp2-dp2, shared": ("diffu-grpo",),
        },
    },
}

Check = tuple[str, Callable[[], None]]


def names(processes: int, part: str) -> list[str]:
    return [name for name, _ in checks(Path(), processes, part)]


def checks(root: Path, processes: int, part: str) -> Iterator[Check]:
    """In order; those of the Megatron engine read what one process wrote, where it can that of the Accelerate
    engine."""
    if processes == 1:
        subjects = [subject for layouts in PARTS[part].values() for found in layouts.values() for subject in found]
        for subject in dict.fromkeys(subjects):
            yield f"{subject}, Accelerate", partial(train_run, root, f"{subject}-accelerate", subject)
            if subject == "new adapter":
                yield subject, partial(train_run, root, f"{subject}-one", subject, engine="megatron")
            elif part != "quick":
                yield subject, partial(equals, root, f"{subject}-one", subject)
        return
    for layout, subjects in PARTS[part].get(processes, {}).items():
        for subject in subjects:
            yield f"{subject} {layout}", partial(equals, root, f"{subject}-{layout}", subject, **LAYOUTS[layout])
    if part == "diffusion" and processes == 2:
        yield "ranks of a replica share", partial(ranks_share, root)
        yield (
            "stops at tp2",
            partial(train_run, root, "cut", "diffu-grpo", engine="megatron", tp=2, steps=1, eval_interval=0),
        )
        yield "goes on at pp2", partial(goes_on, root, "cut", "diffu-grpo", pp=2)
        yield "exact", partial(resumes_exactly, root, "diffu-grpo", "tp2")
    if part == "values" and processes == 2:
        changes: dict[str, Any] = {"engine": "megatron", "steps": 1, "eval_interval": 0}
        yield "stops at tp2", partial(train_run, root, "cut", "value-model", tp=2, **changes)
        yield "goes on at pp2", partial(goes_on, root, "cut", "value-model", pp=2)
        for layout in ("tp2", "dp2-zero"):
            yield f"exact at {layout}", partial(resumes_exactly, root, "value-model", layout)
        yield "one without a value model", partial(train_run, root, "without", "tracerl", pp=2, **changes)
        yield "goes on with none", partial(is_not_there, root, "without", pp=2)
    if part == "others" and processes == 2:
        for subject in ("grpo", "adapter"):
            yield f"exact, {subject}", partial(resumes_exactly, root, subject, "tp2, shared")


def train_run(root: Path, name: str, subject: str, resume: bool = False, **changes: Any) -> None:
    """Run, and keep the gradients of each update by the Hub's names."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = configuration(root, name, subject, **changes)
    kept: list[dict[str, torch.Tensor]] = []
    if config.engine.engine == "megatron":
        make_way(config.parallel.layout, config.parallel.context)
        owner, gradients = MegatronUpdates, megatron_gradients
    else:
        owner, gradients = AccelerateUpdates, hub_gradients  # type: ignore[assignment]
    step = owner.optimizer_step

    def keeping(self: Any, *arguments: Any) -> float:
        kept.append(gradients(self))
        return step(self, *arguments)

    patched = contextlib.nullcontext() if config.model.adapts else mock.patch.object(owner, "optimizer_step", keeping)
    with patched:
        train(config, resume, Console(quiet=True))
    if os.environ["RANK"] == "0":
        torch.save(kept, root / f"{name}.pt")


def configuration(root: Path, name: str, subject: str, **changes: Any) -> RLConfig:
    options = SUBJECTS[subject]
    preferred = options["method"] in PREFERRED
    data = str(root / ("pairs.jsonl" if preferred else "problems.jsonl"))
    rewards = {} if preferred else {"reward": [f"{root / 'wanted.py'}:share"]}
    model = str(root / MODELS.get(subject, "policy"))
    values = {**OPTIONS, **SMOOTH, "steps": STEPS, "model": model, "data": [data], **rewards, **options, **changes}
    if "adapter" in options:
        values["adapter"] = str(root / options["adapter"])
    return RLConfig.from_flags(**values, eval_data=[data], output=str(root / name))


def hub_gradients(engine: AccelerateUpdates) -> dict[str, torch.Tensor]:
    model = engine.plain_model
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {name: gradient.clone() for name, gradient in hub_tensors(model, found).items()}


def megatron_gradients(engine: MegatronUpdates) -> dict[str, torch.Tensor]:
    """Streamed as if they were the weights; empty where each rank has a shard of them only."""
    sharded_over = engine.processes.replicas * engine.config.parallel.cp
    if engine.config.parallel.distributed_optimizer and sharded_over > 1:
        return {}
    weights = [weight for chunk in unwrapped(engine.chunks) for weight in chunk.parameters()]
    kept = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.main_grad
    found = {name: each.clone() for name, each in stream_live_weights(engine.source.bridge.checkpoint, engine.chunks)}
    for weight, data in zip(weights, kept, strict=True):
        weight.data = data
    return found


def equals(root: Path, name: str, subject: str, **changes: Any) -> None:
    """Completions, rewards, losses and norms of every step, every gradient of every update (of an adapter its factors
    at the end), and the weights at the end are those of one process under Accelerate."""
    train_run(root, name, subject, engine="megatron", **changes)
    like = f"{subject}-one" if subject == "new adapter" else f"{subject}-accelerate"
    steps = SUBJECTS[subject].get("steps", STEPS)
    same_rows(rows(root, name), rows(root, like), steps)
    if os.environ["RANK"] != "0":
        return
    if "adapter" in subject:
        places = [root / each / "checkpoints" for each in (name, like)]
        if subject != "new adapter":
            places[1] /= f"step-{steps:07d}"
        one, other = (factors(place, root / MODELS.get(subject, "policy")) for place in places)
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[key], other[key], atol=1e-5) for key in one)
        return
    found, wanted = (torch.load(root / f"{each}.pt") for each in (name, like))
    assert len(found) == len(wanted) >= steps
    for gradients, expected in zip(found, wanted, strict=True):
        assert any(gradient.abs().max() > 1e-4 for gradient in expected.values())
        assert gradients.keys() == (set() if name.endswith("zero") else expected.keys())
        for key, gradient in gradients.items():
            apart = float((gradient - expected[key]).abs().max())
            assert apart <= 1e-4 * float(expected[key].abs().max()) + 1e-7, (key, apart)
    bridge = Bridge.from_megatron(root / name / "checkpoints")
    weights = load_file(root / like / f"checkpoints/step-{steps:07d}" / "model.safetensors")
    assert set(bridge.hub_names()) == weights.keys()
    for key, tensor in weights.items():
        assert torch.allclose(bridge.read(key), tensor, atol=1e-5), key
    if "value" in subject:
        same_values(root, name, like, root / MODELS.get(subject, "policy"), steps)


def same_values(root: Path, name: str, like: str, model: Path, steps: int) -> None:
    """What a run's updates have changed in the weights of its value model is what they changed under Accelerate."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    stored = load_file(root / like / f"checkpoints/step-{steps:07d}" / "value/model.safetensors")
    head = stored.pop("lm_head.weight")
    first = hub_tensors(plain, {key: plain.get_parameter(key).data for key in stored})
    # As if they were a model's own, but for the head.
    run, own = root / name / "checkpoints", root / f"{name}-values"
    iteration = f"iter_{steps:07d}"
    shutil.copytree(run, own, ignore=shutil.ignore_patterns("iter_*"))
    shutil.copytree(run / iteration / "value", own / iteration)
    bridge = Bridge.from_megatron(own)
    pairs = {key: (bridge.read(key), tensor) for key, tensor in hub_tensors(plain, stored).items()}
    pairs["head"] = dcp_tensors(own / iteration)["output_layer.weight"], head
    for key, (found, wanted) in pairs.items():
        change = float((wanted - first.get(key, torch.zeros_like(wanted))).abs().max())
        apart = float((found - wanted).abs().max())
        assert change > 1e-4 or ".experts." in key, key  # which few tokens may choose
        assert apart <= 1e-4 * change + 1e-7, (key, apart, change)


def dcp_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an iteration, with those of the optimizer."""
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in stored.items()
        if isinstance(each, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def ranks_share(root: Path) -> None:
    """Where the ranks of a replica would sample otherwise, as GPUs may round, they all train on what each sampled of
    its own part."""
    complete, sample = Rollouts.complete, Rollouts.sample
    kept: list[tuple[list[int], torch.Tensor, list[float]]] = []
    own: list[list[int]] = []

    def otherwise(self: Rollouts, model: Any, problems: Any, samples: Any, step: int, temperature: float) -> Any:
        if step:
            own.append(list(samples))
        return complete(self, model, problems, [7 * each + dist.get_rank() for each in samples], step, temperature)

    def keeping(self: Rollouts, *arguments: Any) -> Any:
        rollout = sample(self, *arguments)
        kept.append((rollout.samples, rollout.sequences.tokens, rollout.rewards.tolist()))
        return rollout

    with mock.patch.multiple(Rollouts, complete=otherwise, sample=keeping):
        train_run(root, "share", "diffu-grpo", engine="megatron", tp=2, steps=1, eval_interval=0)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (own, kept))
    (first, one), (second, other) = found
    assert [(a[0], a[2]) for a in one] == [(b[0], b[2]) for b in other]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))
    assert (first, second) == ([list(range(8))], [list(range(8, 16))])


def goes_on(root: Path, name: str, subject: str, **changes: Any) -> None:
    """From step 1 of a run, in another layout, to the rows of one that went through."""
    train_run(root, name, subject, resume=True, engine="megatron", **changes)
    same_rows(rows(root, name), rows(root, f"{subject}-accelerate"))


def is_not_there(root: Path, name: str, **changes: Any) -> None:
    """A run that had no value model does not go on with one, and stays as it is."""
    folder = root / name
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    dist.barrier()
    with refused(SettingError, "value_model", name):
        train_run(root, name, "value-model", resume=True, engine="megatron", **changes)
    dist.barrier()  # the first rank's lock is gone
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resumes_exactly(root: Path, subject: str, layout: str) -> None:
    """In the same layout, to the last bit."""
    source, name = f"{subject}-{layout}", f"{subject}-{layout}-again"
    if os.environ["RANK"] == "0":
        shutil.copytree(root / source, root / name, ignore=shutil.ignore_patterns(f"iter_{STEPS:07d}"))
        (root / name / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    dist.barrier()
    train_run(root, name, subject, resume=True, engine="megatron", **LAYOUTS[layout])
    timed = ("tokens_per_s", "tokens_per_s_per_device", "seconds")
    once, again = ([{k: v for k, v in row.items() if k not in timed} for row in rows(root, n)] for n in (source, name))
    assert once == again
    places = [root / each / "checkpoints" for each in (source, name)]
    if "adapter" in subject:
        found, wanted = (factors(place, root / "policy") for place in places)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        return
    one, other = map(Bridge.from_megatron, places)
    assert all(torch.equal(one.read(key), other.read(key)) for key in one.hub_names())
    if "value" in subject:
        one, other = (dcp_tensors(place / f"iter_{STEPS:07d}" / "value") for place in places)
        assert one.keys() == other.keys()
        assert any("exp_avg_sq" in key for key in one)
        assert all(torch.equal(one[key], other[key]) for key in one)


def main(root: Path, part: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for processes in (1, *PARTS[part]):
        fork(root / f"reports-{processes}", processes, partial(checks, root, processes, part))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
