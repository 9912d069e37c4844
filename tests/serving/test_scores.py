"""Log probabilities and likelihood bounds: by the model's own logits, whatever constrains or tempers the text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest
import torch

from dlm_bridge.attention.masks import causal_mask
from dlm_bridge.evaluation.likelihood import Answer, likelihood_bounds
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.generation.offline import write_texts
from dlm_bridge.generation.request import Ended, Request
from dlm_bridge.loading import LoadedModel, load_model
from tests.canvas_models import EOS
from tests.generation.standin import MASK, StandIn, family
from tests.serving.conftest import PATIENCE_S, Running, running

from dlm_bridge.serving.protocol import RequestError, parse_infill, parse_request  # isort: skip  needs fastapi
from dlm_bridge.serving.scores import UNLIKELY, Scored, ScoreRecorder, ScoringEngine  # isort: skip

GEN, TOP = 12, 3
MASKED = -1  # on the canvas
PROMPT = (5, 9, 20, 7)
CHAT = [{"role": "user", "content": "hi"}]


def sampled(
    model: StandIn,
    settings: dict[str, Any],
    prompts: Sequence[Sequence[int]] = (PROMPT,),
    observers: Sequence[Any] = (),
) -> dict[Any, tuple[Ended, list[Any]]]:
    """The end of each row, and the scores of all its tokens as they were streamed."""
    recorder = ScoreRecorder(TOP)
    inner = SamplingEngine(
        model,
        {"gen_length": GEN, "eos_token_id": None, **settings},
        max_rows=len(prompts),
        max_length=64,
        record=True,
        observers=[recorder, *observers],
    )
    engine = ScoringEngine(inner, model, recorder, TOP, 0)
    for number, prompt in enumerate(prompts):
        engine.submit(Request(number, prompt, seed=number))
    streamed: dict[Any, list[Any]] = {number: [] for number in range(len(prompts))}
    ends: dict[Any, tuple[Ended, list[Any]]] = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Scored):
                scores = streamed[event.name]
                if event.first == 0 and len(scores) == len(event.scores):
                    assert list(event.scores) == scores  # with the end: once more, and the same
                scores[event.first :] = event.scores
            elif isinstance(event, Ended):
                ends[event.name] = event, streamed[event.name]
    return ends


def check(scores: Sequence[Any], tokens: Sequence[int], logits_GV: torch.Tensor) -> None:
    """Each score is the log-softmax of these logits."""
    logs_GV = logits_GV.float().log_softmax(dim=-1)
    assert [score.token for score in scores] == list(tokens)
    for score, logs_V in zip(scores, logs_GV, strict=True):
        assert score.logprob == pytest.approx(float(logs_V[score.token]), abs=1e-5)
        values, ids = logs_V.topk(TOP)
        assert [token for token, _ in score.top] == ids.tolist()
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"threshold": 0.3},
        {"temperature": 0.8, "top_k": 5, "steps": 6},
        {"suppress_tokens": [*range(0, 40, 2)], "repetition_penalty": 1.5},
        {"block_length": 4, "temperature": 2.0},
    ],
)
def test_scores_are_of_the_step_that_committed_the_token(settings: dict[str, Any]) -> None:
    model = StandIn(family(algorithm="llada"))
    prompts = [PROMPT, PROMPT[:2]]
    for number, (end, scores) in sampled(model, settings, prompts).items():
        prompt, rows = list(prompts[number]), []
        for position, step in enumerate(end.steps):
            seen = [token if own < step else MASK for token, own in zip(end.tokens, end.steps, strict=True)]
            rows.append(model(torch.tensor([prompt + seen])).logits[0, len(prompt) + position])
        check(scores, end.tokens, torch.stack(rows))


@pytest.mark.parametrize("algorithm", ["idlm", "linear_spec"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossless_samplers_report_the_causal_models_log_probabilities(algorithm: str, temperature: float) -> None:
    if algorithm == "idlm":
        model = StandIn(family("causal", shift=True, name="idlm", algorithm="idlm"))
    else:
        model = StandIn(family(name="nemotron_labs_diffusion", algorithm="linear_spec"), block_size=4)
    model.head[:, 6:MASK] *= 0.02  # drafts are right now and then
    ((end, scores),) = sampled(model, {"temperature": temperature}).values()
    whole = [*PROMPT, *end.tokens]
    logits_SV = model(torch.tensor([whole]), causal_mask(torch.ones(1, len(whole)))).logits[0]
    check(scores, end.tokens, logits_SV[len(PROMPT) - 1 : -1])


def test_what_a_token_changed_to_last_is_scored() -> None:
    """A sampler that masks tokens again, and one that draws all tokens anew: the scores are of the text's tokens."""
    for settings in ({"algorithm": "wino", "block_length": 6}, {"algorithm": "uniform", "steps": 5}):
        ((end, scores),) = sampled(StandIn(family(algorithm="llada")), settings).values()
        assert [score.token for score in scores] == list(end.tokens)
        assert all(UNLIKELY < score.logprob <= 0 for score in scores)
        assert all(len(score.top) == TOP for score in scores)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (
            StandIn(family(name="dreamon", shift=True, algorithm="dreamon"), seed=3),
            {"number_of_mask": 6, "expand_token_id": 44, "delete_token_id": 45, "temperature": 2.0},
        ),
        (
            StandIn(family("block_causal", algorithm="llada2.2"), block_size=6),
            # Committed tokens do not change, but those behind a deleted or split mask move.
            {
                "threshold": 0.2,
                "temperature": 2.0,
                "editing_threshold": 1.0,
                "delete_token_id": 5,
                "split_token_id": 17,
            },
        ),
    ],
    ids=["dreamon", "llada2.2"],
)
def test_a_token_that_moves_keeps_its_score(model: StandIn, settings: dict[str, Any]) -> None:
    """Every token comes from a mask, or has moved from where it was, in the order of the text."""
    expected: dict[Any, list[float | None]] = {}  # scores by place among the columns; None: a mask
    tokens: dict[Any, list[int]] = {}
    moves = 0
    model.head[:, [5, 17]] *= 2  # deletes and splits

    class Tracker:
        unconstrained = True

        def step(self, canvas: Any, rows: list[int], columns: Any, logits_ANV: Any, *_: Any, **__: Any) -> None:
            nonlocal moves
            now_AN = canvas.take(rows, columns).masked_fill(~canvas.behind_prompt(rows, columns), MASKED).tolist()
            for number, row in enumerate(rows):
                name, now = canvas.names[row], now_AN[number]
                source = list(range(len(now))) if canvas.moved is None else canvas.moved[number].tolist()
                before = tokens.get(name, [MASKED] * len(now))
                scores = expected.get(name, [None] * len(now))
                shown = [place for place, token in enumerate(now) if token != MASKED]
                moves += sum(source[place] != place for place in shown if before[source[place]] != MASKED)
                assert all(source[a] < source[b] for a, b in pairwise(shown))
                assert all(before[source[place]] in (MASKED, now[place]) for place in shown)
                logs_NV = logits_ANV[number].log_softmax(dim=-1)
                found: list[float | None] = [None] * len(now)
                for place in shown:
                    new = before[source[place]] == MASKED
                    found[place] = float(logs_NV[source[place], now[place]]) if new else scores[source[place]]
                tokens[name], expected[name] = now, found

        def block(self, canvas: Any, rows: list[int]) -> None:
            for row in rows:
                name = canvas.names[row]
                ended.setdefault(name, []).extend(one for one in expected.pop(name) if one is not None)
                del tokens[name]

    ended: dict[Any, list[float]] = {}
    for name, (end, scores) in sampled(model, settings, [PROMPT, PROMPT[:2], PROMPT[1:]], [Tracker()]).items():
        assert [score.token for score in scores] == list(end.tokens)
        assert [score.logprob for score in scores] == pytest.approx(ended[name][: len(scores)], abs=1e-5)
    assert moves > 0


def test_a_token_that_no_pass_predicted_has_no_value() -> None:
    """RND1 ends its text with a token of its own."""
    model = StandIn(family(shift=True, algorithm="rnd1"))
    ((end, scores),) = sampled(model, {"steps": 6, "eos_token_id": 46}).values()
    assert [score.token for score in scores] == list(end.tokens)
    assert (end.tokens[-1], len(end.tokens), scores[-1].logprob) == (46, GEN, UNLIKELY)
    assert all(UNLIKELY < score.logprob <= 0 for score in scores[:-1])


def test_masks_in_a_text_are_scored() -> None:
    model, prompt = StandIn(family(algorithm="llada")), (5, MASK, MASK, 7, MASK)
    ((end, scores),) = sampled(model, {"infill": True, "gen_length": None}, [prompt]).values()
    assert [score.logprob == UNLIKELY for score in scores] == [True, False, False, True, False]
    rows = []
    for position, step in enumerate(end.steps):
        states = zip(end.tokens, end.steps, prompt, strict=True)
        shown = [token if own < step or given != MASK else MASK for token, own, given in states]
        rows.append(model(torch.tensor([shown])).logits[0, position])
    places = [1, 2, 4]
    check([scores[i] for i in places], [end.tokens[i] for i in places], torch.stack(rows)[places])


# ---- The server.


@pytest.fixture(scope="module")
def autoregressive(qwen3: Any) -> Iterator[Running]:
    with running(load_model(qwen3)) as found:
        yield found


def causal_logs(server: Running, prompt: str, text_ids: Sequence[int]) -> torch.Tensor:
    loaded = server.served.loaded
    ids = loaded.tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        logits = loaded.model(torch.tensor([[*ids, *text_ids]])).logits[0, len(ids) - 1 : -1]
    return logits.float().log_softmax(dim=-1)


def test_an_autoregressive_models_log_probabilities_are_exact(autoregressive: Running) -> None:
    client, tokenizer = autoregressive.client(), autoregressive.served.loaded.tokenizer
    body: dict[str, Any] = {"model": "any", "max_tokens": 8, "temperature": 0.7, "seed": 2}
    answer = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **body)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    plain = client.chat.completions.create(messages=CHAT, **body)
    assert (plain.choices[0].message, plain.choices[0].logprobs) == (answer.choices[0].message, None)
    prompt = tokenizer("user: hi\nassistant: ")["input_ids"]
    settings = {"gen_length": 8, "temperature": 0.7, "seed": 2}
    ids = list(write_texts(autoregressive.served.loaded.model, tokenizer, [prompt], settings).token_ids[0])
    logs = causal_logs(autoregressive, "user: hi\nassistant: ", ids)
    assert [entry.logprob for entry in content] == pytest.approx(logs.gather(1, torch.tensor([ids]).T)[:, 0].tolist())
    for entry, values in zip(content, logs.topk(2).values.tolist(), strict=True):
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(values, abs=1e-5)
    chunks = list(client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, stream=True, **body))
    found = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert [entry.logprob for each in found for entry in each.content] == [entry.logprob for entry in content]


def parts_of_characters(server: Running) -> list[int]:
    """Tokens whose text is not a character: without them, tokenizing a text gives its tokens again."""
    tokenizer = server.served.loaded.tokenizer
    return [token for token in range(256) if not tokenizer.decode([token]).isascii()]


def test_a_stream_sends_scores_with_their_tokens(server: Running) -> None:
    client = server.client()
    body: dict[str, Any] = {"model": "any", "prompt": "the cat ", "max_tokens": 16, "logprobs": 2}
    extra = {"block_length": 4, "suppress_tokens": parts_of_characters(server)}
    whole = client.completions.create(**body, extra_body=extra).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text
    assert whole.logprobs.text_offset[0] == 0
    assert all(1 <= len(tops) <= 2 for tops in whole.logprobs.top_logprobs)
    chunks = list(client.completions.create(**body, stream=True, extra_body=extra))
    assert len(chunks) > 1
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in getattr(part, name)] == getattr(whole.logprobs, name)
    for chunk, part in zip(chunks, parts, strict=True):
        assert chunk.choices[0].text == "".join(part.tokens)


def test_responses_include_log_probabilities(server: Running) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": "any", "input": "hi", "max_output_tokens": 8, "top_logprobs": 1}
    asked["include"] = ["message.output_text.logprobs"]
    part = client.responses.create(**asked).output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    events = list(client.responses.create(**asked, stream=True))
    deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [each.logprob for each in deltas] == [each.logprob for each in part.logprobs]


def test_figures_of_sampling_come_on_request(server: Running) -> None:
    body = {"prompt": "the cat ", "max_tokens": 8, "suppress_tokens": [*parts_of_characters(server), EOS]}
    assert "dlm" not in post(server, body).json()["usage"]
    figures = post(server, {**body, "dlm": True}).json()["usage"]["dlm"]
    assert figures == {"forwards": figures["forwards"], "tokens_per_forward": 8 / figures["forwards"]}
    answer = post(server, {**body, "dlm": {"elbo_samples": 5}, "logprobs": 0}).json()
    loaded = server.served.loaded
    ids, text = (loaded.tokenizer(each)["input_ids"] for each in ("the cat ", answer["choices"][0]["text"]))
    (bound,) = likelihood_bounds(loaded.model, [Answer(tuple(ids), tuple(text))], 5)
    figures = answer["usage"]["dlm"]
    assert figures["elbo_nats"] == pytest.approx(bound.value)
    assert figures["elbo_stderr"] == pytest.approx(bound.error)
    assert figures["mc_samples"] == 5


def test_scores_that_a_model_does_not_have_are_refused(server: Running, autoregressive: Running) -> None:
    for where, body, param in (
        (server, {"prompt": ["a", "b"], "dlm": {"elbo_samples": 2}}, "dlm"),
        (server, {"prompt": [[]], "dlm": {"elbo_samples": 2}}, "dlm"),
        (autoregressive, {"prompt": "a", "dlm": {"elbo_samples": 2}}, "dlm"),
    ):
        answer = post(where, {"max_tokens": 4, **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "echo"),
        ({"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "dlm": {"elbo_samples": 1000}}, "dlm"),
        ({"prompt": "a", "dlm": {"x": 1}}, "dlm"),
        ({"messages": CHAT, "logprobs": 1}, "logprobs"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_malformed_fields_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_request(json.dumps(body).encode(), None)
    assert refused.value.body["error"]["param"] == param


def test_infilling_lists_the_scores_of_each_span(server: Running) -> None:
    body = {"prompt": "the [MASK:3] sat on [MASK:2].", "logprobs": 2, "suppress_tokens": parts_of_characters(server)}
    answer = httpx.post(f"{server.address}/v1/infill", json=body, timeout=PATIENCE_S).json()["choices"][0]
    for text, scores in zip(answer["infills"], answer["logprobs"], strict=True):
        assert "".join(entry["token"] for entry in scores["content"]) == text
        assert all(UNLIKELY < entry["logprob"] <= 0 for entry in scores["content"])
        assert all(len(entry["top_logprobs"]) == 2 for entry in scores["content"])
    with pytest.raises(RequestError) as refused:
        parse_infill(json.dumps({"prompt": "a [MASK]", "dlm": True}).encode())
    assert refused.value.body["error"]["param"] == "dlm"


def test_a_request_without_scores_has_the_plain_engine(diffusion: LoadedModel) -> None:
    with running(diffusion) as found:
        engine = found.served.open_engine({}, 1)
        assert type(engine) is SamplingEngine
        engine.close()


def post(server: Running, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.address}/v1/completions", json=body, timeout=PATIENCE_S)


def test_an_empty_prompt_is_refused_and_no_tokens_are_no_prompt(server: Running) -> None:
    answer = post(server, {"prompt": "", "max_tokens": 4})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert post(server, {"prompt": [[]], "max_tokens": 4}).status_code == 200
