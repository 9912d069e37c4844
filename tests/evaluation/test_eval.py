"""`dlm-bridge eval`: tasks and perplexity on tiny models of both kinds, what is recorded, and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dlm_bridge.cli.eval import evaluate
from dlm_bridge.errors import DlmBridgeError, InputFileError, MissingExtraError, RowError, SettingError
from dlm_bridge.evaluation import harness
from dlm_bridge.evaluation.harness import FOLDER, LOCAL, local_task
from dlm_bridge.evaluation.likelihood import Answer, is_greedy, likelihood_bounds
from dlm_bridge.evaluation.options import EvaluationOptions
from dlm_bridge.evaluation.perplexity import exact_log_likelihoods
from dlm_bridge.evaluation.resume import FinishedParts
from dlm_bridge.loading import LoadedModel, Placement, load_model
from dlm_bridge.models.modeling_llada import LLaDAConfig, LLaDAModelLM
from tests.checkpoints import llada_config
from tests.processes import launch
from tests.refusals import hide, refused

TEXT = " ".join(f"Question: What is {n} + {n}?\nAnswer: {2 * n}" for n in range(40))
Eval = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        datasets.disable_progress_bars()
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=280, special_tokens=["<eos>", "<mask>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>", mask_token="<mask>")
    torch.manual_seed(0)
    sizes = {"vocab_size": 288, "mask_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    config = llada_config(
        d_model=32, n_layers=2, n_heads=2, n_kv_heads=2, mlp_hidden_size=48, embedding_size=288, **sizes
    )
    del config["auto_map"]
    models: dict[str, Any] = {
        "llada": LLaDAModelLM(LLaDAConfig(**{**config, "max_sequence_length": 256})),
        "llama": LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                vocab_size=288,
                max_position_embeddings=256,
                bos_token_id=0,
                eos_token_id=0,
            )
        ),
    }
    for name, model in models.items():
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3)  # far from uniform answers
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in models}


@pytest.fixture(scope="module")
def opened(folders: dict[str, Path]) -> dict[str, LoadedModel]:
    return {name: load_model(folder, Placement("cpu")) for name, folder in folders.items()}


@pytest.fixture
def run(folders: dict[str, Path], tmp_path: Path) -> Eval:
    def _run(model: str, **options: Any) -> dict[str, Any]:
        output = tmp_path / f"results-{model}"
        given = {"mc_samples": 4, "max_length": 128, "device": "cpu", "overwrite": True, **options}
        evaluate(str(folders[model]), **{"output": output, **given})
        facts: dict[str, Any] = json.loads((output / "results.json").read_text())
        if (output / "samples.jsonl").exists():
            facts["samples"] = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
        return facts

    return _run


def _answers(opened: LoadedModel, row: dict[str, Any]) -> list[Answer]:
    """The choices of a multiple choice document, split as the harness splits them."""
    doc = row["doc"]
    prompt = opened.tokenizer(f"{doc['question']}\nAnswer:")["input_ids"]
    whole = [opened.tokenizer(f"{doc['question']}\nAnswer: {choice}")["input_ids"] for choice in doc["choices"]]
    return [Answer(tuple(prompt), tuple(ids[len(prompt) :])) for ids in whole]


def test_local_tasks_say_what_is_true() -> None:
    assert LOCAL == ("orders", "sums")
    sums = [json.loads(line) for line in (FOLDER / "sums.jsonl").read_text().splitlines()]
    for row in sums:
        left, sign, right = row["question"].removeprefix("Question: What is ").removesuffix("?").split()
        assert int(row["answer"]) == int(left) + int(right) * (1 if sign == "+" else -1)
    orders = [json.loads(line) for line in (FOLDER / "orders.jsonl").read_text().splitlines()]
    for row in orders:
        shown = row["question"].removeprefix("Question: What comes next? ").removesuffix(", ...").split(", ")
        right = row["choices"][row["answer"]]
        assert len({*row["choices"], *shown}) == 4 + len(shown)
        if shown[0].isdigit():
            numbers = [int(word) for word in [*shown, right]]
            assert len({after - before for before, after in itertools.pairwise(numbers)}) == 1
    assert len({row["question"] for row in sums}) == len({row["question"] for row in orders}) == 64


def test_diffusion_model(run: Eval, opened: dict[str, LoadedModel], capsys: pytest.CaptureFixture[str]) -> None:
    """Choices by the bounds, texts by the sampler with the settings that are recorded; the same again the same."""
    model = opened["llada"]
    options = {"tasks": ["orders,sums"], "limit": 3, "set": ["steps=8", "gen_length=16"]}
    facts = run("llada", **options)
    assert "orders" in capsys.readouterr().out
    rows = {task: [row for row in facts["samples"] if row["task"] == task] for task in ("orders", "sums")}
    right = []
    for row in rows["orders"]:
        found = [bound.value for bound in likelihood_bounds(model.model, _answers(model, row), samples=4)]
        assert [float(response[0][0]) for response in row["resps"]] == pytest.approx(found, rel=1e-4)
        right.append(max(range(4), key=lambda number: found[number]) == row["doc"]["answer"])
    entry = facts["tasks"]["orders"]
    assert entry["metrics"]["acc,none"] == pytest.approx(sum(right) / 3)
    assert entry["documents"] == {"original": 64, "effective": 3}
    assert entry["sampler"] is None
    sampler = facts["tasks"]["sums"]["sampler"]
    assert {"algorithm": "llada", "steps": 8, "gen_length": 16, "block_length": 16}.items() <= sampler.items()
    assert (sampler["eos_token_ids"], sampler["stop_strings"], sampler["temperature"]) == ([0], ["\n"], 0.0)
    for row in rows["sums"]:
        ids = model.tokenizer(f"{row['doc']['question']}\nAnswer:", return_tensors="pt")["input_ids"]
        written = model.model.generate(ids, gen_length=16, steps=8)[0, ids.shape[1] :]
        expected = model.tokenizer.decode(written, skip_special_tokens=True).split("\n")[0]
        assert row["resps"] == [[expected]]
    assert (facts["kind"], facts["family"], facts["settings"]["mc_samples"]) == ("diffusion", "llada", 4)
    assert facts["likelihood"].startswith("bound: MaskedDiffusion")
    assert facts["versions"]["lm-eval"]
    again = run("llada", **options)
    assert again["tasks"] == facts["tasks"]
    assert [row["resps"] for row in again["samples"]] == [row["resps"] for row in facts["samples"]]


def _ask(
    model: LoadedModel, asked: dict[str, Any], count: int = 1, **settings: Any
) -> tuple[list[str], dict[str, Any]]:
    """What `count` equal requests of a task are answered, and the settings that are recorded."""
    metadata = ("task", 0, count)
    request = Instance("generate_until", {}, ("What is 7 + 7?", {"max_gen_toks": 8, **asked}), 0, metadata=metadata)
    harness_model = harness.DiffusionHarness(model, EvaluationOptions(max_length=64, **settings))
    return harness_model.generate_until([request] * count), harness_model.sampled["task"]


def test_answers_are_greedy_unless_the_task_or_the_caller_draws(
    opened: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the harness's own models take it, whatever the checkpoint's sampler does by itself."""
    model = opened["llada"]
    monkeypatch.setattr(model.model.generation_config, "temperature", 0.7)
    for asked, sampler, expected in [
        ({}, {}, 0.0),
        ({"do_sample": False}, {}, 0.0),
        ({"do_sample": False, "temperature": 1}, {}, 0.0),
        ({"temperature": 0.0, "top_p": 0.9}, {}, 0.0),
        ({"temperature": 0.3}, {}, 0.3),
        ({"do_sample": True}, {}, 1.0),
        ({"do_sample": True, "temperature": 0.2}, {}, 0.2),
        ({"do_sample": False}, {"temperature": 0.5}, 0.5),
        ({"do_sample": False}, {"do_sample": True}, 0.7),  # the checkpoint's
        ({"do_sample": True}, {"do_sample": False}, 0.0),
    ]:
        assert _ask(model, asked, set=sampler)[1]["temperature"] == expected
    drawn = _ask(model, {"do_sample": True, "temperature": 0.2, "top_p": 0.95})[1]
    assert (drawn["top_p"], drawn["gen_length"]) == (0.95, 8)
    assert _ask(model, {"do_sample": False, "top_p": 0.95})[1]["top_p"] is None
    assert _ask(model, {"do_sample": True, "top_p": 0.95}, set={"do_sample": False})[1]["top_p"] is None
    penalised = _ask(model, {"repetition_penalty": 1.5}, set={"suppress_tokens": [5]})[1]
    assert (penalised["repetition_penalty"], penalised["suppress_tokens"]) == (1.5, [5])
    with pytest.raises(DlmBridgeError, match="num_beams"):
        _ask(model, {"num_beams": 5})


def test_a_task_s_words_for_the_length_are_the_harness_s(opened: dict[str, LoadedModel]) -> None:
    model = opened["llada"]
    assert _ask(model, {"max_gen_toks": None, "max_new_tokens": 16, "until": [""]})[1]["gen_length"] == 16
    for name in ("gen_length", "max_new_tokens"):
        assert _ask(model, {}, set={name: 4})[1]["gen_length"] == 4
    assert _ask(model, {"block_length": 8}, set={"block_size": 4})[1]["block_length"] == 4


def test_repeated_answers_are_drawn_anew_in_every_batch(opened: dict[str, LoadedModel]) -> None:
    """Of pass@k and self-consistency: the seed gives the same answers however many are drawn together."""
    drawn = {"do_sample": True, "temperature": 2.0}
    answers, _ = _ask(opened["llada"], drawn, count=6, batch_size=2)
    assert len({*answers}) == 6
    assert _ask(opened["llada"], drawn, count=6, batch_size=4)[0] == answers
    assert _ask(opened["llada"], drawn, count=6, seed=1)[0] != answers
    unseeded = [_ask(opened["llada"], drawn, set={"seed": None})[0] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_a_text_begins_once(opened: dict[str, LoadedModel]) -> None:
    """A chat template writes the token that the tokenizer puts before a text."""
    tokenizer = copy.deepcopy(opened["llada"].tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    first = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", first)])
    model = harness.DiffusionHarness(replace(opened["llada"], tokenizer=tokenizer), EvaluationOptions())
    plain = model.tok_encode("What is 7?")
    assert plain[0] == first
    assert first not in plain[1:]
    assert model.tok_encode("<bos>What is 7?") == plain
    assert model.tok_encode("What is 7?", add_special_tokens=False) == plain[1:]


CHAT = (
    "{% for m in messages %}<{{ m.role }}{{ mark }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("model", ["llada", "llama"])
@pytest.mark.fast("llada")
def test_the_chat_that_a_task_is_asked_in(
    run: Eval, folders: dict[str, Path], opened: dict[str, LoadedModel], tmp_path: Path, model: str
) -> None:
    tokenizer = copy.deepcopy(opened[model].tokenizer)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = {"tasks": ["sums"], "limit": 1, "shots": 1, "set": ["gen_length=4"], "system": "Be brief."}
    options["tokenizer"] = str(tmp_path / "tokenizer")

    def asked(**more: Any) -> tuple[str, dict[str, Any]]:
        facts = run(model, **options, **more)
        return facts["samples"][0]["arguments"][0][0], facts["settings"]

    chat = {"chat": True, "chat_template_args": ["mark=!"]}
    plain, _ = asked()
    turns, settings = asked(**chat)
    single, _ = asked(**chat, fewshot_as_multiturn=False)
    assert plain.startswith("Be brief.")
    assert turns.startswith("<system!>Be brief.<user!>")
    assert (turns.count("<user!>"), turns.count("<assistant!>"), single.count("<user!>")) == (2, 1, 1)
    assert "<assistant!>" not in single
    assert (settings["system"], settings["fewshot_as_multiturn"]) == ("Be brief.", True)
    assert settings["chat_template_args"] == {"mark": "!"}
    # A system message that the template refuses is not dropped.
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(DlmBridgeError, match="no system"):
        asked(**chat)


def test_code_of_the_model_runs_with_consent_alone(run: Eval, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    task = tmp_path / "own.yaml"
    task.write_text(json.dumps({**local_task("sums"), "task": "own", "unsafe_code": True}))
    options = {"tasks": [str(task)], "limit": 1, "set": ["gen_length=4"]}
    with refused(SettingError, "confirm_run_unsafe_code", "own"):
        run("llada", **options)
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "0"
    assert "own" in run("llada", **options, confirm_run_unsafe_code=True)["tasks"]
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"  # for the metric code_eval


@pytest.mark.parametrize("model", ["llada", "llama"])
@pytest.mark.fast("llada")
def test_an_interrupted_evaluation_is_resumed(
    run: Eval, folders: dict[str, Path], tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed twice, and all comes out as without the interrupt."""
    monkeypatch.setattr(harness, "TOGETHER", 1)
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"tasks": ["orders", "sums"], "limit": 2, "set": ["gen_length=4"], "batch_size": "2"}
    options |= {"perplexity": tmp_path / "text.txt", "window": 50, "mc_samples": 3, "max_length": 128, "device": "cpu"}
    written: list[str] = []
    add = FinishedParts.add

    def interrupt(after: int) -> None:
        def adds(parts: FinishedParts, section: str, values: Any) -> None:
            add(parts, section, values)
            written.append(section)
            if len(written) == after:
                raise KeyboardInterrupt

        monkeypatch.setattr(FinishedParts, "add", adds)

    interrupt(-1)
    whole = run(model, **options)
    total = len(written)
    assert len(set(written)) == 3
    options |= {"overwrite": False, "output": tmp_path / "out"}
    folder, seen = str(folders[model]), list[str]()
    while len(seen) < total - 1:  # interrupted again and again
        written.clear()
        interrupt(min(3, total - 1 - len(seen)))
        with pytest.raises(KeyboardInterrupt, match=r"results\.json\.partial"):
            evaluate(folder, resume=bool(seen), **options)
        assert list((tmp_path / "out").iterdir()) == [tmp_path / "out/results.json.partial"]
        seen += written
    for field, more in {"output": {}, "resume": {"resume": True, "seed": 1}}.items():
        with refused(SettingError, field, "results.json.partial"):
            evaluate(folder, **{**options, **more})
    written.clear()
    interrupt(-1)
    evaluate(folder, resume=True, **options)
    assert len(seen) + len(written) == total
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "samples.jsonl"}
    resumed = json.loads((tmp_path / "out/results.json").read_text())
    for task, entry in whole["tasks"].items():
        assert resumed["tasks"][task]["metrics"] == pytest.approx(entry["metrics"], rel=1e-5, nan_ok=True)
    assert resumed["perplexity"] == pytest.approx(whole["perplexity"], rel=1e-5)
    rows = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert [row["filtered_resps"] for row in rows if row["task"] == "sums"] == [
        row["filtered_resps"] for row in whole["samples"] if row["task"] == "sums"
    ]


def test_autoregressive_model_is_exact(run: Eval, opened: dict[str, LoadedModel], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    facts = run("llama", tasks=["orders"], limit=3, perplexity=tmp_path / "text.txt", window=50)
    model = opened["llama"]
    for row in facts["samples"]:
        answers = _answers(model, row)
        found = exact_log_likelihoods(model.model, answers)
        assert [float(response[0][0]) for response in row["resps"]] == pytest.approx(found, rel=1e-4)
        for value, answer in zip(found, answers, strict=True):
            logits = model.model(torch.tensor([[*answer.prompt, *answer.answer]])).logits[
                0, len(answer.prompt) - 1 : -1
            ]
            assert value == pytest.approx(
                -F.cross_entropy(logits, torch.tensor(answer.answer), reduction="sum").item(), rel=1e-4
            )
    ids = [0, *model.tokenizer(TEXT)["input_ids"]]  # behind the token that ends texts, for want of another
    total = 0.0
    for start in range(0, 3 * 49, 49):  # three windows
        row = torch.tensor([ids[start : start + 50]])
        total += F.cross_entropy(model.model(row).logits[0, :-1], row[0, 1:], reduction="sum").item()
    text = facts["perplexity"]
    assert (text["exact"], text["windows"], text["tokens"], text["error"]) == (True, 3, 147, 0.0)
    assert text["nats"] == pytest.approx(total / 147, rel=1e-5)
    assert text["perplexity"] == pytest.approx(math.exp(total / 147), rel=1e-4)
    assert text["bits_per_byte"] == pytest.approx(total / math.log(2) / text["bytes"], rel=1e-5)
    assert facts["likelihood"] == "exact"


@pytest.mark.parametrize("name", ["gen_length", "max_new_tokens"])
def test_an_autoregressive_model_writes_as_much_as_the_caller_says(
    run: Eval, opened: dict[str, LoadedModel], name: str
) -> None:
    model = opened["llama"]
    for row in run("llama", tasks=["sums"], limit=2, set=[f"{name}=3"])["samples"]:
        ids = model.tokenizer(f"{row['doc']['question']}\nAnswer:", return_tensors="pt")["input_ids"]
        written = model.model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
        assert row["resps"] == [[model.tokenizer.decode(written, skip_special_tokens=True).split("\n")[0]]]


def test_what_an_autoregressive_model_draws_does_not_depend_on_the_batch(run: Eval) -> None:
    def texts(batch_size: str, **options: Any) -> list[Any]:
        given = {"tasks": ["sums"], "limit": 5, "set": ["temperature=1.5", "gen_length=8"], **options}
        return [row["resps"] for row in run("llama", batch_size=batch_size, **given)["samples"]]

    drawn = texts("2")
    assert texts("5") == drawn
    assert texts("2", seed=1) != drawn
    assert texts("2", set=["gen_length=8"]) != drawn


def test_perplexity_bound_of_a_text(run: Eval, opened: dict[str, LoadedModel], tmp_path: Path) -> None:
    """In windows of two tokens nothing is left to chance: each is predicted from the one before, alone."""
    (tmp_path / "text.txt").write_text("What is 7?")
    model = opened["llada"]
    ids = [0, *model.tokenizer("What is 7?")["input_ids"]]
    expected = 0.0
    for before, token in itertools.pairwise(ids):
        expected -= model.model(torch.tensor([[before, 1]])).logits[0, 1].log_softmax(-1)[token].item()
    text = run("llada", perplexity=tmp_path / "text.txt", window=2)["perplexity"]
    assert text["nats"] == pytest.approx(expected / (len(ids) - 1), rel=1e-5)
    assert (text["exact"], text["bytes"], text["error"] < 1e-6) == (False, 10, True)
    wider = run("llada", perplexity=tmp_path / "text.txt")["perplexity"]
    assert wider["windows"] == 1
    assert wider["error"] > 0


def test_a_task_of_ones_own_may_ask_for_greedy_answers(
    run: Eval, opened: dict[str, LoadedModel], tmp_path: Path
) -> None:
    """A YAML file; of its two documents the first has the token that the model would write."""
    model = opened["llada"]
    prompt = model.tokenizer("What is")["input_ids"]
    logits = model.model(torch.tensor([[*prompt, 1]])).logits[0, -1]
    words = {word: model.tokenizer(f" {word}")["input_ids"] for word in ("Answer", "What", "is", "Question", "+")}
    likely = max((word for word, ids in words.items() if len(ids) == 1), key=lambda word: logits[words[word][0]])
    docs = [{"text": "What is", "next": f" {likely}"}, {"text": "What is", "next": " 7 Answer"}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tmp_path / "own.yaml").write_text(
        "task: own\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path}/own.jsonl\n"
        "test_split: test\noutput_type: loglikelihood\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{next}}'\n"
        "target_delimiter: ''\nmetric_list:\n  - metric: acc\n  - metric: perplexity\n"
    )
    facts = run("llada", tasks=[str(tmp_path / "own.yaml")])
    rows = sorted(facts["samples"], key=lambda row: row["doc_id"])
    for row, doc in zip(rows, docs, strict=True):
        ids = model.tokenizer(doc["text"] + doc["next"])["input_ids"]
        answer = Answer(tuple(prompt), tuple(ids[len(prompt) :]))
        assert json.loads(str(row["resps"][0][0][1]).lower()) == is_greedy(model.model, answer)
        assert float(row["resps"][0][0][0]) == pytest.approx(
            likelihood_bounds(model.model, [answer], 4)[0].value, rel=1e-4
        )
    assert "acc,none" in facts["tasks"]["own"]["metrics"]


def test_a_number_may_name_a_task(
    tmp_path: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    task = tmp_path / "own.yaml"
    task.write_text(json.dumps({**local_task("sums"), "task": 7077}))
    evaluate(str(folders["llada"]), tasks=[str(task)], limit=1, set=["gen_length=4"], max_length=128, device="cpu")
    assert "7077" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        '{"task": "own',  # no YAML
        {"frobnicate": 1},
        {"metric_list": 3},
        {"doc_to_text": False},  # while the requests are built
        {"doc_to_target": {}},
        {"metric_list": [{"metric": "frobnicate"}]},  # when the answers are there
    ],
)
def test_a_damaged_task_is_named(run: Eval, tmp_path: Path, wrong: Any) -> None:
    task = tmp_path / "own.yaml"
    task.write_text(wrong if isinstance(wrong, str) else json.dumps({**local_task("sums"), "task": "own", **wrong}))
    with refused(InputFileError, task) as error:
        run("llada", tasks=[str(task)], limit=1, set=["gen_length=4"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["multiple_choice", "generate_until", "loglikelihood_rolling"])
@pytest.mark.fast("generate_until", "loglikelihood_rolling")
def test_documents_with_the_mask_token_are_named_before_anything_is_run(
    run: Eval, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Those of the last task, too; of an autoregressive model the token is one like any other."""
    texts = ["What is 1 + 1?", "What <mask>?", "What is 2 + 2?", "<mask>"]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    task = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "" if kind == "loglikelihood_rolling" else "{{question}}",
        "doc_to_target": "{{question}}" if kind == "loglikelihood_rolling" else 0,
        "metric_list": [
            {"metric": {"multiple_choice": "acc", "generate_until": "exact_match"}.get(kind, "byte_perplexity")}
        ],
    }
    if kind == "multiple_choice":
        task["doc_to_choice"] = ["1", "2"]
    (tmp_path / "own.yaml").write_text(json.dumps(task))
    options = {"tasks": [f"orders,{tmp_path / 'own.yaml'}"], "limit": 4, "set": ["gen_length=4"]}
    run("llama", **options)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be run")

    for name in ("PromptSampler", "likelihood_bounds"):
        monkeypatch.setattr(harness, name, fail)
    with refused(RowError, "task own, document 1, task own, document 3", "mask token"):
        run("llada", **options)


def test_a_text_with_the_mask_token_is_named_by_its_window(run: Eval, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("What is 1 + 1? " * 30 + "<mask>")
    with pytest.raises(RowError, match=r"text.txt, window (\d+): .*mask token 1"):
        run("llada", perplexity=tmp_path / "text.txt", window=16)
    assert run("llada", perplexity=tmp_path / "text.txt", window=16, limit=2)["perplexity"]["windows"] == 2


def test_settings_stored_with_an_autoregressive_model_that_generate_refuses_are_named(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["llama"], tmp_path / "llama")
    stored = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**stored, "eos_token_id": {"a": 1}}))
    with pytest.raises(DlmBridgeError, match="generate refuses"):
        evaluate(str(folder), tasks=["sums"], limit=1, max_length=128, device="cpu")


def test_a_failure_of_the_model_is_not_the_task_s(run: Eval, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("a mistake")

    monkeypatch.setattr(harness, "PromptSampler", fail)
    with pytest.raises(TypeError, match="a mistake"):
        run("llada", tasks=["sums"], limit=1, set=["gen_length=4"])


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ({}, SettingError, ("tasks", "perplexity")),
        ({"tasks": ["sums"], "limit": 0}, SettingError, ("limit", "1")),
        ({"tasks": ["sums"], "resume": True, "output": None}, SettingError, ("resume", "output")),
        ({"tasks": ["order"]}, SettingError, ("tasks", "order", "orders, sums")),
        ({"tasks": ["missing.yaml"]}, InputFileError, ("missing.yaml",)),
        ({"tasks": ["orders"], "chat": True}, SettingError, ("chat", "tokenizer")),
        ({"tasks": ["sums"], "set": ["gen_length=128"]}, SettingError, ("max_length", "128")),
        ({"tasks": ["sums"], "set": ["num_return_sequences=2"]}, SettingError, ("num_return_sequences",)),
        ({"tasks": ["sums"], "set": ["infill=True"]}, SettingError, ("infill",)),
        ({"tasks": ["sums"], "set": ["stepz=4"]}, SettingError, ("stepz",)),
        (
            {"tasks": ["sums"], "set": ["return_dict_in_generate=True"]},
            SettingError,
            ("set", "return_dict_in_generate"),
        ),
        ({"perplexity": Path("/nowhere.txt")}, InputFileError, ("/nowhere.txt",)),
        ({"perplexity": Path("/dev/null")}, InputFileError, ("/dev/null",)),
    ],
)
def test_bad_input_is_named(
    run: Eval, options: dict[str, Any], kind: Any, named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "TaskManager", lambda include_defaults: TaskManager(include_defaults=False))
    with refused(kind, *named) as error:
        run("llada", **options)
    assert "\n" not in str(error.value)


def test_refusals_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results.json").write_text("{}")
    with refused(SettingError, "output", "results.json", "overwrite"):
        evaluate("no/model", tasks=["orders"], output=tmp_path)
    hide(monkeypatch, "lm_eval")
    with refused(MissingExtraError, "tasks", "dlm-bridge[eval]"):
        evaluate("no/model", tasks=["orders"])


@pytest.mark.slow  # processes that import the harness
def test_several_processes_evaluate_as_one(
    run: Eval, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shares of the rows, as shards of one model, and in two groups of two: the same answers and figures."""
    own = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(FOLDER / "sums.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood",  # whose metric asks for greedy answers
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_target": " {{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    }
    (tmp_path / "own.yaml").write_text(json.dumps(own))
    tasks = f"orders,sums,{tmp_path / 'own.yaml'}"
    words = ["--tasks", tasks, "--limit", "5", "--mc-samples", "3", "--max-length", "128", "--batch-size", "2"]
    layouts: dict[str, list[str]] = {"shares": [], "shards": ["--tp-plan", "auto"], "groups": ["--tp", "2"]}
    drawn = {"llada": [], "llama": ["temperature=1.5", "gen_length=8"]}
    commands = {
        f"{layout} {name}": [
            "eval", str(folder), *words, *more, *(word for one in drawn[name] for word in ("--set", one)),
            "--output", str(tmp_path / f"{layout}-{name}"),
        ]
        for layout, more in layouts.items()
        for name, folder in folders.items()
    }  # fmt: skip
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    said = {}
    for processes in (2, 4):
        root = tmp_path / str(processes)
        root.mkdir()
        own_commands = {name: command for name, command in commands.items() if ("groups" in name) == (processes == 4)}
        (root / "commands.json").write_text(json.dumps(own_commands))
        said |= launch("tests.cli.tp_worker", root, processes)
    options = {"limit": 5, "mc_samples": 3, "max_length": 128, "batch_size": "2"}
    alone = {name: run(name, tasks=[tasks], set=drawn[name], **options) for name in folders}
    for command in commands:
        layout, name = command.split()
        assert command in said, said
        for rank, one in enumerate(said[command]):
            code, out, err, _ = json.loads(one)
            assert code == 0, err
            assert bool(out) == (rank == 0)
        folder = tmp_path / f"{layout}-{name}"
        facts = json.loads((folder / "results.json").read_text())
        rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert facts["settings"]["processes"] == {"shares": 2, "shards": 1, "groups": 2}[layout]
        assert len(rows) == len(alone[name]["samples"]) == 15
        for row, expected in zip(rows, alone[name]["samples"], strict=True):
            assert row["doc_id"] == expected["doc_id"]
            if name == "llada" and layout == "shares":  # batches are the same
                assert row == expected
            elif row["task"] == "sums":
                assert row["filtered_resps"] == expected["filtered_resps"]
            else:
                found, wanted = (np.array(one["filtered_resps"], dtype=float) for one in (row, expected))
                np.testing.assert_allclose(found, wanted, rtol=1e-5)
        for task, entry in alone[name]["tasks"].items():
            for metric, value in entry["metrics"].items():
                assert facts["tasks"][task]["metrics"][metric] == pytest.approx(value, rel=1e-5), (task, metric)
