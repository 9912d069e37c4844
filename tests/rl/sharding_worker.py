"""The processes for checks of reinforcement learning under FSDP2, forked from one that has imported what they need.

python -m tests.rl.sharding_worker FOLDER
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from safetensors.torch import load_file

from dlm_bridge.train.accelerate.fsdp import full_tensor
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.reinforcement import AUTOREGRESSIVE, PREFERRED
from dlm_bridge.train.rl.accelerate_engine import train
from tests.processes import fork

WORLDS = (1, 2, 4)
STEPS = 3
SAMPLED = {
    "group_size": 4,
    "global_batch_size": 16,
    "micro_batch_size": 2,
    "gen_length": 4,
    "beta": 0.1,
    "updates": 2,
    "eval_interval": STEPS,
}
METHODS: dict[str, dict[str, Any]] = {
    "diffu-grpo": SAMPLED,
    "block-grpo": {**SAMPLED, "trace_steps": 2},
    "tracerl": {**SAMPLED, "trace_steps": 2},
    "vrpo": {"global_batch_size": 8, "micro_batch_size": 1, "elbo_levels": 2, "eval_interval": STEPS},
    "grpo": SAMPLED,
    "value-model": {
        **SAMPLED,
        "method": "tracerl",
        "trace_steps": 2,
        "value_model": True,
        "value_lr": 2e-3,
        "gae_lambda": 0.9,
    },
    "dpo": {"global_batch_size": 8, "micro_batch_size": 1, "eval_interval": STEPS},
}
FORMS = {"experts": "diffu-grpo", "blocks": "block-grpo"}  # other models, by their folders
OPTIONS: dict[str, Any] = {
    "seq_length": 16,
    "lr": 1e-3,
    "weight_decay": 0.0,
    "save_interval": 0,
    "save_steps": "1",
}

Check = tuple[str, Callable[[], None]]


def names(processes: int) -> list[str]:
    return [name for name, _ in checks(Path(), processes)]


def checks(root: Path, processes: int) -> Iterator[Check]:
    """In order; those of more processes read what one process wrote."""
    if processes == 1:
        for method in METHODS:
            yield method, partial(train_run, root, f"{method}-1", method)
        for form, method in FORMS.items():
            yield form, partial(train_run, root, f"{form}-1", method, model=str(root / form))
        yield "an adapter", partial(train_run, root, "adapter-1", "diffu-grpo", lora_rank=2)
        yield "an adapter of experts", partial(train_run, root, "expert-adapter-1", "diffu-grpo", **_experts(root))
        yield "DoRA", partial(train_run, root, "dora-1", "diffu-grpo", lora_rank=2, lora_dora=True)
        return
    for method in METHODS if processes == 2 else ("diffu-grpo", "vrpo", "value-model"):
        yield method, partial(equals, root, f"{method}-{processes}", f"{method}-1", method, sharding="fsdp")
    yield "goes on", partial(goes_on, root, f"diffu-grpo-{processes}", sharding="fsdp")
    yield "a value model goes on", partial(goes_on, root, f"value-model-{processes}", "value-model", sharding="fsdp")
    for size in (2, 4)[: processes // 2]:
        shared = {"sharding": "fsdp", "rollout_tp": size}
        for method in ("diffu-grpo", "grpo") if processes == 2 else ("diffu-grpo",):
            name = f"{method}-{processes}-tp{size}"
            yield f"{method}, {size} sample together", partial(equals, root, name, f"{method}-1", method, **shared)
        yield f"goes on, {size} sample together", partial(goes_on, root, f"diffu-grpo-{processes}-tp{size}", **shared)
    if processes == 2:
        for form, method in FORMS.items():
            for size, how in ((1, form), (2, f"{form}, 2 sample together")):
                more = {"model": str(root / form), "sharding": "fsdp", "rollout_tp": size}
                yield how, partial(equals, root, f"{form}-2-tp{size}", f"{form}-1", method, **more)
        for size, how in ((1, "an adapter of experts"), (2, "an adapter of experts that is merged")):
            more = {**_experts(root), "sharding": "fsdp", "rollout_tp": size}
            name = f"expert-adapter-2-tp{size}"
            yield how, partial(equals, root, name, "expert-adapter-1", "diffu-grpo", **more)
        more = {"sharding": "fsdp", "rollout_tp": 2, "lora_rank": 2, "lora_dora": True}
        yield "an adapter that is merged", partial(equals, root, "dora-2", "dora-1", "diffu-grpo", **more)
        yield "an adapter", partial(equals, root, "adapter-2", "adapter-1", "diffu-grpo", sharding="fsdp", lora_rank=2)
        more = {"sharding": "fsdp", "cpu_offload": True, "gradient_checkpointing": True}
        yield "recomputed and offloaded", partial(equals, root, "more-2", "vrpo-1", "vrpo", **more)
        yield "half precision", partial(half_precision, root)
        yield "goes on from one process", partial(goes_on, root, "diffu-grpo-1", sharding="fsdp")
        yield "goes on, not cut", partial(goes_on, root, "diffu-grpo-2")
        yield "a value model goes on, not cut", partial(goes_on, root, "value-model-2", "value-model")
        yield (
            "a value model goes on from one process",
            partial(goes_on, root, "value-model-1", "value-model", sharding="fsdp"),
        )
    else:
        copies = {"sharding": "fsdp", "fsdp_replicas": 2}
        yield "replicas", partial(equals, root, "replicas-4", "diffu-grpo-1", "diffu-grpo", **copies)
        yield "replicas go on", partial(goes_on, root, "replicas-4", **copies, rollout_tp=2)


def _experts(root: Path) -> dict[str, Any]:
    return {"model": str(root / "experts"), "lora_rank": 2, "lora_targets": "q_proj,experts"}


def train_run(root: Path, name: str, method: str, resume: bool = False, **changes: Any) -> None:
    """Run, and keep the gradients of the first update."""
    AcceleratorState._reset_state(reset_partial_state=True)
    data = str(root / ("pairs.jsonl" if method in PREFERRED else "problems.jsonl"))
    rewards = {} if method in PREFERRED else {"reward": [f"{root / 'wanted.py'}:share"]}
    model = str(root / ("causal" if method in AUTOREGRESSIVE else "policy"))
    values = {**OPTIONS, "method": method, "steps": STEPS, "model": model, "data": [data], **rewards}
    values |= {**METHODS[method], **changes}
    config = RLConfig.from_flags(**values, eval_data=[data], output=str(root / name))
    step = torch.optim.AdamW.step
    kept: list[list[torch.Tensor]] = []

    def keeping(self: Any, *arguments: Any, **more: Any) -> Any:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        if not kept and not resume:
            kept.append([full_tensor(weight.grad, torch.device("cpu")).clone() for weight in weights])
        return step(self, *arguments, **more)

    with mock.patch.object(torch.optim.AdamW, "step", keeping):
        train(config, resume, Console(quiet=True))
    if kept and os.environ["RANK"] == "0":
        torch.save(kept[0], root / f"{name}.pt")


def equals(root: Path, name: str, like: str, method: str, **changes: Any) -> None:
    """Completions, rewards, losses and norms of every step, every gradient of the first update, and the weights at the
    end are those of one process."""
    train_run(root, name, method, **changes)
    same_rows(rows(root, name), rows(root, like))
    if os.environ["RANK"] != "0":
        return
    found, wanted = (torch.load(root / f"{each}.pt") for each in (name, like))
    assert len(found) == len(wanted) > 3
    assert any(gradient.abs().max() > 0 for gradient in wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max() + 1e-9, (one.shape, one - other)
    ours, theirs = (root / each / f"checkpoints/step-{STEPS:07d}" for each in (name, like))
    listed = [{path.name for path in folder.iterdir()} for folder in (ours, theirs)]
    assert listed[0] == listed[1] | {"optimizer"}, listed
    if (theirs / "value").is_dir():
        weights, expected = (load_file(folder / "value" / "model.safetensors") for folder in (ours, theirs))
        assert weights.keys() == expected.keys()
        assert all(torch.allclose(weights[key], expected[key], atol=4e-4) for key in expected)
    file = "adapter_model.safetensors" if (theirs / "adapter_model.safetensors").is_file() else "model.safetensors"
    weights, expected = (load_file(folder / file) for folder in (ours, theirs))
    assert weights.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.allclose(weights[key], tensor, atol=2e-4), key  # Adam's first steps go by signs


def same_rows(found: list[dict[str, Any]], wanted: list[dict[str, Any]], steps: int = STEPS) -> None:
    assert len(found) == len(wanted) == steps
    for row, expected in zip(found, wanted, strict=True):
        assert row.keys() == expected.keys()
        exact = {"reward", "reward_std", "completion_length", "tokens", "preferred", "eval_reward", "eval_preferred"}
        for key in (exact | {"loss", "grad_norm", "kl", "eval_loss", "margin", "value_loss"}) & expected.keys():
            if expected[key] is None:
                assert row[key] is None, key
            else:
                rel = 1e-9 if key in exact else 1e-4
                assert row[key] == pytest.approx(expected[key], rel=rel, abs=1e-6), (key, row, expected)


def half_precision(root: Path) -> None:
    train_run(root, "half", "diffu-grpo", sharding="fsdp", precision="bf16")
    saved = load_file(root / f"half/checkpoints/step-{STEPS:07d}/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def goes_on(root: Path, source: str, method: str = "diffu-grpo", **changes: Any) -> None:
    """From step 1 of a run, cut otherwise, to the rows of one that went through."""
    name = f"{source}-resumed-{os.environ['WORLD_SIZE']}-{changes.get('sharding')}"
    if os.environ["RANK"] == "0":
        shutil.copytree(root / source, root / name, ignore=shutil.ignore_patterns(f"step-{STEPS:07d}"))
    torch.distributed.barrier()
    train_run(root, name, method, resume=True, **changes)
    same_rows(rows(root, name), rows(root, f"{method}-1"))


def rows(root: Path, name: str) -> list[dict[str, Any]]:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]


def main(root: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for processes in WORLDS:
        fork(root / f"reports-{processes}", processes, partial(checks, root, processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
