"""One of two processes that load every family with transformers' tensor parallelism and compare logits and
samples.

Usage: tp_worker.py FOLDER, where FOLDER/<case> is a checkpoint and FOLDER/<case>.pt its input_ids, logits and sampled.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import dlm_bridge  # noqa: F401
from dlm_bridge.convert.checkpoints.in_memory import hub_tensors, stored_tensors
from dlm_bridge.generation.offline import GeneratedTexts, write_texts
from dlm_bridge.generation.runtime.tensor_parallel import use_plain_shards
from dlm_bridge.registration import extensions
from tests.families.case import FamilyCase, all_cases
from tests.generation.recorded import stand_in
from tests.processes import OK


def check(case: FamilyCase, root: Path) -> str:
    model = case.load(root / case.id, distributed_config=DistributedConfig(tp_plan="auto"))
    saved = torch.load(root / f"{case.id}.pt")
    with torch.no_grad():
        logits = model(saved["input_ids"]).logits
    torch.testing.assert_close(logits, saved["logits"], atol=1e-5, rtol=1e-5)
    if saved["first"]:
        for cache, tokens in saved["sampled"].items():
            assert torch.equal(sampled(model, saved["input_ids"], cache), tokens), cache
        check_drawn(model, saved["input_ids"])
    cut = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor) and held(parameter)]
    if len(cut) < 2 * model.config.num_hidden_layers:
        return f"only these are cut: {cut}"
    said = check_plain_shards(model, saved)
    return check_streamed_shards(case, root, saved) if said == OK else said


def check_streamed_shards(case: FamilyCase, root: Path, saved: dict[str, Any]) -> str:
    """The same logits and tokens of a model that was cut without its weights, which then come by the Hub's names, one
    whole tensor at a time."""
    if "train.rl" not in extensions():
        return OK
    from dlm_bridge.train.rl.replica import RolloutModel

    whole = case.load(root / case.id)
    copied = RolloutModel(whole, whole.dtype, "", dist.group.WORLD)
    tensors = hub_tensors(whole, dict(stored_tensors(whole)))
    for _ in range(2):
        with copied.allocated(torch.device("cpu")) as model:
            assert sum(each.numel() for each in model.parameters()) < sum(each.numel() for each in whole.parameters())
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
            writer = copied.hub_writer()
            assert writer.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            with torch.no_grad():
                torch.testing.assert_close(model(saved["input_ids"]).logits, saved["logits"], atol=1e-5, rtol=1e-5)
            assert torch.equal(sampled(model, saved["input_ids"]), saved["sampled"][None]), "streamed shards"
        assert all(parameter.is_meta for parameter in model.parameters())
    return OK


def check_plain_shards(model: Any, saved: dict[str, Any]) -> str:
    """The same logits and tokens without transformers' wrappers, from the same shards."""
    before = sum(parameter.to_local().numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
    if not use_plain_shards(model):
        return "transformers' layers were kept"
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) >= before
    with torch.no_grad():
        torch.testing.assert_close(model(saved["input_ids"]).logits, saved["logits"], atol=1e-5, rtol=1e-5)
    assert torch.equal(sampled(model, saved["input_ids"]), saved["sampled"][None]), "plain shards"
    if saved["first"]:
        with pytest.MonkeyPatch.context() as patch:
            stand_in(patch)
            recorded = sampled(model, saved["input_ids"], execution="compiled")
        assert torch.equal(recorded, saved["sampled"][None]), "plain shards, recorded"
    return OK


def sampled(model: Any, input_ids: torch.Tensor, cache: str | None = None, **more: Any) -> torch.Tensor:
    """The best tokens after some of the input."""
    prompt = input_ids[:, :7].where(input_ids[:, :7] != 99, 98)
    return model.generate(
        prompt, gen_length=8, temperature=0.0, seed=1, mask_token_id=99, eos_token_id=None, cache=cache, **more
    )


def check_drawn(model: Any, input_ids: torch.Tensor) -> None:
    """Processes whose random numbers differ draw the same tokens, without a seed; and the first one's decide."""
    prompt = input_ids[:, :7].where(input_ids[:, :7] != 99, 98)
    given = {"gen_length": 8, "temperature": 2.0, "mask_token_id": 99, "eos_token_id": None}
    both = []
    for other in (3, 4):
        torch.manual_seed(2 if dist.get_rank() == 0 else other)
        drawn = model.generate(prompt, **given)
        gathered = [torch.empty_like(drawn) for _ in range(2)]
        dist.all_gather(gathered, drawn)
        both += gathered
    assert all(torch.equal(one, both[0]) for one in both)
    assert not torch.equal(both[0], model.generate(prompt, **given))


def drawn_by_the_command(place: Path) -> str:
    """The tokens that this process draws, as JSON, where `dlm-bridge generate` is given no seed."""
    from dlm_bridge.cli import app, generate_run

    results: list[GeneratedTexts] = []

    def seen(*args: Any, **kwargs: Any) -> GeneratedTexts:
        results.append(write_texts(*args, **kwargs))
        return results[-1]

    generate_run.write_texts = seen
    words = f"generate {place} --prompt cat --gen-length 16 --temperature 2 --set eos_token_id=null --tp-plan auto"
    sys.argv = ["dlm-bridge", *words.split()]
    with contextlib.suppress(SystemExit):
        app.main()
    return json.dumps(results[0].token_ids)


def held(parameter: DTensor) -> bool:
    """Whether this process has less than the whole."""
    return parameter.to_local().numel() < parameter.numel()


def main() -> None:
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    report = {}
    for case in (case for case in all_cases() if (root / case.id).is_dir()):
        try:
            report[case.id] = check(case, root)
        except Exception:
            report[case.id] = traceback.format_exc()
    if (root / "megatron").is_dir():
        report["command"] = drawn_by_the_command(root / "megatron")  # the last: it ends the process group
    (root / f"report_{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
