"""Rows enter a running batch and leave it, each with the tokens that it would have alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.generation import batch_size
from dlm_bridge.generation.request import Committed, Ended, Extended, Failed
from dlm_bridge.loading import LoadedModel, load_model
from dlm_bridge.serving.model import ServedModel
from dlm_bridge.serving.protocol import TextRequest
from dlm_bridge.serving.scheduler import Job, Scheduler
from tests.families.case import FamilyCase, some_slow
from tests.generation.test_caches import load_case
from tests.generation.test_families import DIFFUSION
from tests.serving.conftest import PATIENCE_S, wait_until

Told = list[tuple[str, Any]]


def row_of(
    served: ServedModel, name: str, told: Told, on_event: Callable[[Job, Any], None] | None = None, **settings: Any
) -> Job:
    """The row of a request, whose events are told under its name."""
    request = TextRequest(chat=False, prompts=(f"the {name} ",), settings={"block_length": 4, **settings}, seed=1)

    def listen(event: Any) -> None:
        told.append((name, event))
        if on_event is not None:
            on_event(row, event)

    (row,) = served.jobs(request, lambda _: listen)
    return row


def alone(served: ServedModel, row: Job) -> list[int]:
    """The new tokens of `generate` for a row."""
    model = served.loaded.model
    ids = torch.tensor([row.prompt])
    settings = {**row.settings, "seed": 1}
    return model.generate(ids, **settings)[0, ids.shape[1] :].tolist()


def ended(told: Told) -> dict[str, Ended]:
    """The rows that have ended, in this order."""
    return {name: event for name, event in told if isinstance(event, Ended)}


def test_rows_enter_and_leave_a_running_batch(diffusion: LoadedModel) -> None:
    served, told = ServedModel(diffusion, "tiny", {}), Told()
    late = row_of(served, "late", told, gen_length=8, temperature=0.5)

    def submit_late(_: Job, event: Any) -> None:
        if isinstance(event, Extended) and not late.overtaken:
            late.overtaken = 1  # once
            scheduler.submit([late])

    early = row_of(served, "early", told, submit_late, gen_length=32, temperature=0.5)
    scheduler = Scheduler(served.open_engine, batch_size=2, queue_size=2)
    scheduler.submit([early])
    scheduler.start()
    wait_until(lambda: len(ended(told)) == 2, "both end")
    assert list(ended(told)) == ["late", "early"]
    for row, name in ((early, "early"), (late, "late")):
        assert list(ended(told)[name].tokens) == alone(served, row)
        pieces = [event.tokens for who, event in told if who == name and isinstance(event, Extended)]
        assert sum(pieces, ()) == ended(told)[name].tokens
        commits = [event for who, event in told if who == name and isinstance(event, Committed)]
        assert sorted(place for event in commits for place in event.positions) == list(range(len(alone(served, row))))
    assert scheduler.forwards == 32  # the late row took part in passes of the early one
    assert scheduler.tokens == 40
    scheduler.close(PATIENCE_S)


def test_a_cancelled_row_leaves_the_others_in_peace(diffusion: LoadedModel) -> None:
    served, told = ServedModel(diffusion, "tiny", {}), Told()

    def leave(row: Job, event: Any) -> None:
        if isinstance(event, Extended):
            scheduler.cancel([row])

    gone = row_of(served, "gone", told, leave, gen_length=128)
    stays = row_of(served, "stays", told, gen_length=16)
    scheduler = Scheduler(served.open_engine, batch_size=2, queue_size=2)
    scheduler.submit([gone, stays])
    scheduler.start()
    wait_until(lambda: bool(ended(told)) and not scheduler.running, "the row that stays ends, and the batch")
    assert list(ended(told)["stays"].tokens) == alone(served, stays)
    assert len([name for name, _ in told if name == "gone"]) < 8
    assert scheduler.forwards == 16
    scheduler.close(PATIENCE_S)


def test_autoregressive_rows_of_equal_settings_share_a_batch(qwen3: Any) -> None:
    served, told = ServedModel(load_model(qwen3), "tiny", {}), Told()
    requests = [
        TextRequest(chat=False, prompts=("the a", "the longer b"), settings={"gen_length": 12, "temperature": 0}),
        TextRequest(chat=False, prompts=("c",), settings={"gen_length": 12, "temperature": 0.5}, seed=3),
    ]
    rows = [
        row
        for request in requests
        for row in served.jobs(request, lambda index: lambda event: told.append((str(index), event)))
    ]
    assert rows[0].group == rows[1].group != rows[2].group
    scheduler = Scheduler(served.open_engine, batch_size=4, queue_size=4)
    scheduler.submit(rows[:2])
    scheduler.start()
    wait_until(lambda: len(ended(told)) == 2, "both end")
    assert scheduler.forwards == 12
    for name in ("0", "1"):
        pieces = [event.tokens for who, event in told if who == name and isinstance(event, Extended)]
        assert sum(pieces, ()) == ended(told)[name].tokens
    scheduler.close(PATIENCE_S)


UNSERVED = ("llada_moe", "dream", "fast_dllm_v2", "wedlm", "nemotron_labs_diffusion", "a2d_qwen3")


@pytest.mark.parametrize(
    "case", some_slow((case for case in DIFFUSION if case.id in UNSERVED), "fast_dllm_v2", "nemotron_labs_diffusion")
)
@pytest.mark.fast("dream", "wedlm")
def test_families_that_no_engine_serves(case: FamilyCase, tmp_path: Path) -> None:
    model, mask = load_case(case, tmp_path)
    served, told = ServedModel(LoadedModel(model, None, case.spec.name, True), "tiny", {}, 100), Told()
    settings = {"gen_length": 32, "temperature": 0.5, "eos_token_id": None, "mask_token_id": mask}
    request = TextRequest(chat=False, prompts=((5, 6, 7), (8, 9, 10, 11, 12, 13)), settings=settings, seed=2)
    rows = served.jobs(request, lambda index: lambda event: told.append((str(index), event)))
    scheduler = Scheduler(served.open_engine, batch_size=2, queue_size=2)
    scheduler.submit(rows)
    scheduler.start()
    wait_until(lambda: len([event for _, event in told if isinstance(event, Ended | Failed)]) == 2, "both end")
    for name, row in zip("01", rows, strict=True):
        ids = torch.tensor([row.prompt])
        alone = model.generate(ids, **settings, seed=2)[0, ids.shape[1] :].tolist()
        assert list(ended(told)[name].tokens) == alone
    scheduler.close(PATIENCE_S)


def test_the_batch_size_follows_from_free_memory(
    diffusion: LoadedModel, qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in (diffusion, load_model(qwen3)):
        served = ServedModel(loaded, "tiny", {"gen_length": 16}, max_length=48)
        found = []
        for free in (2**20, 2**26, 2**28):
            monkeypatch.setattr(batch_size, "free_memory", lambda device, free=free: free)
            plan = served.plan()
            assert plan.length == 48
            assert plan.rows == 1 or plan.rows * (plan.cache + plan.activations + plan.logits) <= free
            found.append(plan.rows)
        assert found[0] < found[1] < found[2]
