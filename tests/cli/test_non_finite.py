"""Models with NaN weights end every command with one line and exit code 2, HTTP requests with 500."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dlm_bridge.cli.app import main
from dlm_bridge.errors import DlmBridgeError, NonFiniteError
from dlm_bridge.evaluation.likelihood import Answer, is_greedy
from dlm_bridge.generation.gemma import GemmaEngine
from dlm_bridge.generation.offline import write_texts
from dlm_bridge.generation.request import Ended, Failed, Request
from dlm_bridge.loading import LoadedModel, Placement, load_model
from dlm_bridge.serving.model import ServedModel
from dlm_bridge.serving.protocol import TextRequest
from dlm_bridge.serving.scheduler import Scheduler
from dlm_bridge.serving.web_page import PageModel
from dlm_bridge.train.rl.reward_worker import RewardScores
from dlm_bridge.train.rl.rollout import Rollouts
from dlm_bridge.train.rl.rows import Problem
from tests.canvas_models import has_class, write_canvas_model
from tests.cli.conftest import llada, qwen3  # noqa: F401  fixtures
from tests.serving.conftest import PATIENCE_S, running, wait_until

KINDS = ["llada", "qwen3", pytest.param("gemma", marks=has_class)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_canvas_model(tmp_path_factory.mktemp("models") / "gemma")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The folder of a model of this kind whose output for one token is NaN."""
    known: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in known:
            loaded = load_model(request.getfixturevalue(kind), Placement("cpu"))
            with torch.no_grad():
                loaded.model.get_output_embeddings().weight[7] = torch.nan
            known[kind] = tmp_path_factory.mktemp("nan") / kind
            loaded.model.save_pretrained(known[kind])
            loaded.tokenizer.save_pretrained(known[kind])
        return known[kind]

    return folder


def run(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    patch.setattr(sys, "argv", ["dlm-bridge", *map(str, words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["generate", "{model}", "--prompt", "the cat"], "the model's logits"),
        (["generate", "{model}", "--prompt", "the cat", "--show"], "the model's logits"),
        (["generate", "{model}", "--jsonl", "{jsonl}", "--output", "{out}"], "prompts.jsonl:2"),
        (["eval", "{model}", "--tasks", "sums", "--limit", 2, "--output", "{out}"], "task sums, document"),
        (["eval", "{model}", "--tasks", "orders", "--limit", 2, "--output", "{out}"], "log-likelihood"),
        (["eval", "{model}", "--perplexity", "{jsonl}", "--output", "{out}"], "log-likelihood"),
    ],
    ids=["prompt", "show", "jsonl", "texts", "choices", "perplexity"],
)
@pytest.mark.fast("*-llada", "jsonl-*")
def test_commands(
    folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    words: list[Any],
    named: str,
) -> None:
    if kind == "gemma" and named == "log-likelihood":
        pytest.skip("it has none")
    jsonl = tmp_path / "prompts.jsonl"
    jsonl.write_text("\n" + "".join(json.dumps({"prompt": text}) + "\n" for text in ("a longer one", "b")))
    places = {"model": folders(kind), "jsonl": jsonl, "out": tmp_path / "out"}
    length = ["--set", "max_new_tokens=16"] if words[0] == "eval" else ["--gen-length", 16]
    words = [word.format(**places) if isinstance(word, str) else word for word in words]
    code, out, err = run(monkeypatch, capsys, *words, *length, *(["--max-length", 400] if words[0] == "eval" else []))
    assert code == 2, err
    last = err.strip().splitlines()[-1]
    assert "NaN" in last
    # All rows of a closed batch: none is named.
    assert named in last or (kind == "qwen3" and "jsonl" in named)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    assert words[0] == "generate" or out == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.fast("*-llada")
def test_the_server(folders: Callable[[str], Path], kind: str, stream: bool) -> None:
    body = {"prompt": ["the cat", "sat"], "max_tokens": 16, "stream": stream}
    with running(load_model(folders(kind), Placement("cpu"))) as server:
        answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)
        if stream:
            *texts, last = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
            assert not any(choice["text"] for text in texts for choice in json.loads(text)["choices"])
            error = json.loads(last)["error"]
        else:
            assert answer.status_code == 500
            error = answer.json()["error"]
        assert error["type"] == "server_error"
        assert "NaN" in error["message"]
        assert error["message"].startswith("choice ")
        assert httpx.get(f"{server.address}/health").status_code == 200


@pytest.mark.parametrize("kind", KINDS)
def test_the_page(folders: Callable[[str], Path], kind: str) -> None:
    loaded = load_model(folders(kind), Placement("cpu"))
    page = PageModel(loaded.model, loaded.tokenizer, "nan", diffusion=loaded.diffusion)
    try:
        algorithm = next(iter(page.controls()))
        *_, last = page.sample("continue", "the cat", algorithm, {"gen_length": "16"})
    finally:
        page.close()
    assert "refusal" in last
    assert "NaN" in last


class NoRewards:
    functions: tuple[Any, ...] = ()

    def __call__(self, prompts: Any, completions: Any, rows: Any) -> RewardScores:
        raise AssertionError("nothing to score")


@pytest.mark.parametrize("kind", ["llada", "qwen3"])
def test_rollouts(folders: Callable[[str], Path], kind: str) -> None:
    loaded = load_model(folders(kind), Placement("cpu"))
    rollouts = Rollouts(
        loaded.tokenizer, NoRewards(), seed=3, group_size=2, gen_length=8, temperature=1.0, sampler={},
        autoregressive=not loaded.diffusion,
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match="NaN"):
        rollouts.sample(loaded.model, [Problem("ab", "ab", [2, 3], {}, "")], step=1, first=0)


def spoil(loaded: LoadedModel, passes: int, row: int | None = None) -> Any:
    """Let an autoregressive model's logits be NaN after so many forward passes."""
    calls: list[None] = []

    def hook(_: Any, __: Any, output: Any) -> None:
        calls.append(None)
        if len(calls) > passes:
            output.logits[slice(None) if row is None else row] = torch.nan

    return loaded.model.register_forward_hook(hook)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"num_beams": 3}], ids=["greedy", "drawn", "beams"])
def test_an_autoregressive_model_that_goes_wrong_later(qwen3: Path, settings: dict[str, Any]) -> None:  # noqa: F811
    """In one row alone, which is named, unless its text has ended before."""
    loaded = load_model(qwen3, Placement("cpu"))
    given = {"gen_length": 8, "seed": 1, **settings}
    prompts = [[5, 6, 7], [8, 9, 10]]
    beams = settings.get("num_beams", 1)
    expected = write_texts(loaded.model, loaded.tokenizer, prompts, given)
    for row, rows in ((None, ()), (beams, (1,))):
        handle = spoil(loaded, 5, row)
        with pytest.raises(NonFiniteError) as error:
            write_texts(loaded.model, loaded.tokenizer, prompts, given)
        handle.remove()
        assert error.value.rows == rows
    if beams == 1:
        other, own = expected.token_ids
        place = next(place for place in range(1, 6) if own[place] not in (*other, *own[:place]))
        ends = {**given, "eos_token_id": [own[place]]}
        expected = write_texts(loaded.model, loaded.tokenizer, prompts, ends)
        assert [len(tokens) for tokens in expected.token_ids] == [8, place + 1]
        handle = spoil(loaded, place + 1, 1)
        assert write_texts(loaded.model, loaded.tokenizer, prompts, ends).texts == expected.texts
        handle.remove()


def test_one_autoregressive_row_of_the_server_fails_alone(qwen3: Path) -> None:  # noqa: F811
    loaded = load_model(qwen3, Placement("cpu"))
    handle = spoil(loaded, 0, 1)
    served, told = ServedModel(loaded, "tiny", {}), list[list[Any]]([[], []])
    request = TextRequest(chat=False, prompts=("the cat", "sat"), settings={"gen_length": 6}, seed=None)
    rows = served.jobs(request, lambda index: told[index].append)
    scheduler = Scheduler(served.open_engine, batch_size=2, queue_size=4)
    scheduler.submit(rows)
    scheduler.start()
    wait_until(lambda: all(events and isinstance(events[-1], Ended | Failed) for events in told), "both end")
    scheduler.close(PATIENCE_S)
    handle.remove()
    assert isinstance(told[0][-1], Ended)
    assert [type(event) for event in told[1]] == [Failed]
    assert isinstance(told[1][-1].error, NonFiniteError)


@has_class
def test_a_row_of_diffusion_gemma_fails_alone(gemma: Path) -> None:
    """The row whose canvas becomes NaN in a later pass leaves; the others have their texts."""
    loaded = load_model(gemma, Placement("cpu"))
    given = {"max_new_tokens": 16, "steps": 3, "eos_token_id": None}
    prompts = {1: [5, 6, 7], 2: [8, 9], 3: [10, 11, 12, 13]}

    def ends(spoiled: bool) -> dict[int, Any]:
        batch = GemmaEngine(loaded.model, loaded.tokenizer, given, max_rows=3)
        for number, prompt in prompts.items():
            batch.submit(Request(number, prompt, seed=number))
        found: dict[int, Any] = {}
        handle = spoil(loaded, 4, 1) if spoiled else None
        while not batch.idle:
            for event in batch.step():
                if isinstance(event, Failed):
                    found[event.name] = event
                    assert handle is not None
                    handle.remove()
                elif isinstance(event, Ended):
                    found[event.name] = event.tokens
        return found

    expected, found = ends(spoiled=False), ends(spoiled=True)
    failed = [number for number, end in found.items() if isinstance(end, Failed)]
    assert len(failed) == 1
    assert isinstance(found[failed[0]].error, NonFiniteError)
    assert {**expected, failed[0]: found[failed[0]]} == found


@has_class
def test_diffusion_gemma_by_transformers_own_loop(folders: Callable[[str], Path]) -> None:
    loaded = load_model(folders("gemma"), Placement("cpu"))
    settings = {"gen_length": 8, "steps": 2, "disable_compile": True}
    with pytest.raises(NonFiniteError):
        write_texts(loaded.model, loaded.tokenizer, [[5, 6], [7, 8]], settings)


def test_greedy_decoding_that_a_metric_asks_for(folders: Callable[[str], Path]) -> None:
    loaded = load_model(folders("llada"), Placement("cpu"))
    with pytest.raises(NonFiniteError):
        is_greedy(loaded.model, Answer((5,), (6, 8)))


def test_the_error_is_one_of_bad_input() -> None:
    assert issubclass(NonFiniteError, DlmBridgeError)
    assert str(NonFiniteError("why", range(5))) == "row 0, row 1, row 2 (and 2 more): why"
