"""DiffusionGemma served in a batch that rows enter and leave."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from dlm_bridge.generation.request import Committed, Ended, Extended
from dlm_bridge.loading import LoadedModel, load_model
from dlm_bridge.serving.model import ServedModel
from dlm_bridge.serving.protocol import TextRequest
from dlm_bridge.serving.scheduler import Scheduler
from tests.canvas_models import CANVAS, has_class, write_canvas_model
from tests.generation.test_gemma import STEPS, by_hand
from tests.serving.conftest import PATIENCE_S, running, wait_until

pytestmark = has_class


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("models") / "gemma"
    return load_model(write_canvas_model(folder))


def test_the_server_answers_with_canvases(loaded: LoadedModel) -> None:
    """Rows of different lengths and seeds share a batch; each is what transformers writes for it alone."""
    served = ServedModel(loaded, "tiny", {})
    served.check()
    told: dict[str, list[Any]] = {}

    def submit(name: str, text: str, seed: int, **more: Any) -> None:
        settings = {"steps": STEPS, "eos_token_id": None, **more}
        request = TextRequest(chat=False, prompts=(text,), settings=settings, seed=seed)
        scheduler.submit(served.jobs(request, lambda _: lambda event: heard(name, event)))

    def heard(name: str, event: Any) -> None:
        told.setdefault(name, []).append(event)
        if name == "first" and len(told["first"]) == 1:  # its first canvas
            submit("late", "a longer one", 7, gen_length=12)

    scheduler = Scheduler(served.open_engine, batch_size=2, queue_size=4)
    submit("first", "the cat", 1, gen_length=28)
    submit("second", "sat", 4, gen_length=CANVAS)
    scheduler.start()
    wait_until(lambda: sum(isinstance(events[-1], Ended) for events in told.values()) == 3, "all end")
    scheduler.close(PATIENCE_S)
    for name, text, seed, length in (
        ("first", "the cat", 1, 28),
        ("second", "sat", 4, 8),
        ("late", "a longer one", 7, 12),
    ):
        *events, end = told[name]
        assert list(end.tokens) == by_hand(loaded, text, seed, max_new_tokens=length)[:length]
        assert end.finish_reason == "length"
        assert sum((event.tokens for event in events if isinstance(event, Extended)), ()) == end.tokens
        commits = [event for event in events if isinstance(event, Committed)]
        assert [place for event in commits for place in event.positions] == list(range(length))
    assert scheduler.forwards < STEPS * (4 + 1 + 2)  # passes that rows shared


def test_a_stop_string_ends_a_served_row_with_its_canvas(loaded: LoadedModel) -> None:
    served, told = ServedModel(loaded, "tiny", {}), []
    settings = {"steps": STEPS, "eos_token_id": None, "gen_length": 4 * CANVAS}
    tokens = by_hand(loaded, "the cat", max_new_tokens=4 * CANVAS)
    text = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    settings["stop_strings"] = [text[len(text) // 3]]
    request = TextRequest(chat=False, prompts=("the cat",), settings=settings, seed=1)
    scheduler = Scheduler(served.open_engine, batch_size=2, queue_size=2)
    scheduler.submit(served.jobs(request, lambda _: told.append))
    scheduler.start()
    wait_until(lambda: told and isinstance(told[-1], Ended) and not scheduler.running, "the text ends")
    scheduler.close(PATIENCE_S)
    end = told[-1]
    assert end.finish_reason == "stop"
    assert list(end.tokens) == tokens[: len(end.tokens)]
    assert settings["stop_strings"][0] in loaded.tokenizer.decode(end.tokens)
    assert settings["stop_strings"][0] not in loaded.tokenizer.decode(end.tokens[:-1])
    assert scheduler.forwards == STEPS * -(-len(end.tokens) // CANVAS) < 4 * STEPS


def test_what_clients_of_transformers_send_is_no_error(loaded: LoadedModel) -> None:
    config = {"max_new_tokens": 12, "do_sample": False, "steps": STEPS, "transformers_version": "5.23.0"}
    body = {"messages": [{"role": "user", "content": "hi"}], "generation_config": json.dumps(config)}
    with running(loaded) as server:
        answer = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] <= 12
        for wrong in ({"temperature": 1}, {"t_min": 0.9}):
            answer = httpx.post(f"{server.address}/v1/completions", json={"prompt": "a", **wrong})
            assert answer.status_code == 400
            assert "t_max" in answer.json()["error"]["message"]


@pytest.mark.extension("structured")
def test_a_draft_ends_in_a_text_of_its_format(loaded: LoadedModel) -> None:
    with running(loaded) as server:
        body = {"prompt": "the cat", "max_tokens": 12, "seed": 1, "regex": "[a-f]+-[0-9]{2,}", "steps": 4}
        answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert re.fullmatch("[a-f]+-[0-9]{2,}", answer.json()["choices"][0]["text"])
        answer = httpx.post(f"{server.address}/v1/completions", json={**body, "logprobs": 2}, timeout=PATIENCE_S)
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        assert len(choice["logprobs"]["tokens"]) == usage["completion_tokens"]
        assert all(-9999 < value <= 0 for value in choice["logprobs"]["token_logprobs"])
        body |= {"dlm": {"elbo_samples": 2}}
        answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dlm")
