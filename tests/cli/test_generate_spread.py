"""`dlm-bridge generate` and `eval` over the processes of a launcher, with shards of a model or shares of the rows; and
a model over the CPU and the disk."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dlm_bridge.cli.app import main
from tests.checkpoints import write_tokenizer
from tests.cli import tp_worker
from tests.cli.conftest import EOS, MASK, TOKENIZER, Cli
from tests.cli.pages import Page
from tests.families import llada2_moe, sdar
from tests.processes import launch

PROMPTS = [{"prompt": "abc", "id": 1}, {"prompt": "de"}, {"prompt": "fghij"}]
LONG = ("--gen-length", "16", "--set", "eos_token_id=null")
GREEDY = ("--prompt", "abc", *LONG, "--temperature", "0")
DRAWN = ("--prompt", "abc", *LONG, "--temperature", "2")
# What the error of each names.
REFUSED = {
    "uneven": "--tp: 3 ",
    "whole": "--tp-plan: ",
    "stdin": "--jsonl: ",
    "adapter": "--tp-plan: ",
    "mapped": "--device-map: ",
}
REFUSED_GROUPS = {"odd": "3", "one prompt": "2", "cut head": "3"}  # what the error of --tp names
# Prompts of different lengths, one of them twice.
SHARED = [{"prompt": "abc" * length, "id": length} for length in (1, 5, 2, 1, 4)]
SHARED_MODELS = ("llada", "sdar", "qwen3")
SAMPLED = ("--gen-length", "12", "--set", "eos_token_id=null", "--temperature", "2", "--batch-size", "2")
MEASURED = ("--window", "12", "--mc-samples", "3", "--batch-size", "4", "--json")


class Said(NamedTuple):
    """What a command said in one process, and the tokens that it drew."""

    code: int
    out: str
    err: str
    drawn: list[list[int]]


class Together(NamedTuple):
    """What each command said in each of several processes, which ran all of them together."""

    root: Path
    models: dict[str, Path]
    said: dict[str, list[Said]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, llada: Path, qwen3: Path) -> dict[str, Path]:
    """Tiny models by name: bidirectional, block-causal, block-causal with experts, autoregressive, and one whose heads
    two processes cannot share."""
    root = tmp_path_factory.mktemp("models")
    ids = {"vocab_size": 272, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS}
    blocks = sdar.CASES[0].write(root / "sdar", **ids)
    experts = llada2_moe.CASE.write(root / "llada2", **ids)
    for folder in (blocks, experts):
        write_tokenizer(folder, TOKENIZER)
    uneven = shutil.copytree(qwen3, root / "uneven")
    config = json.loads((uneven / "config.json").read_text()) | {"num_attention_heads": 6, "num_key_value_heads": 3}
    (uneven / "config.json").write_text(json.dumps(config))
    adapter = root / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(llada)}))
    return {"llada": llada, "sdar": blocks, "llada2": experts, "qwen3": qwen3, "uneven": uneven, "adapter": adapter}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Together:
    root = tmp_path_factory.mktemp("two")
    (root / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    split = ("--tp-plan", "auto")
    file = (
        "--jsonl",
        root / "in.jsonl",
        "--output",
        root / "out.jsonl",
        "--batch-size",
        2,
        *LONG,
        "--temperature",
        "2",
        *split,
    )
    shared = write_shared(root)
    (root / "bad.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "<mask>", "de")))
    bad = ("--jsonl", root / "bad.jsonl", *SAMPLED)
    commands: dict[str, tuple[Any, ...]] = {
        **{f"greedy {name}": (models[name], *GREEDY, *split) for name in ("llada", "sdar", "llada2", "qwen3")},
        **{f"drawn {name}": (models[name], *DRAWN, *split) for name in ("llada", "sdar", "llada2", "qwen3")},
        "seeded": (models["sdar"], *DRAWN, *split, "--seed", 5, "--json"),
        "watched": (models["sdar"], *DRAWN, *split, "--seed", 5, "--html", root / "page.html", "--show"),
        "file": (models["llada"], *file, "--seed", 5, "--json"),
        "compiled": (models["llada"], *GREEDY, *split, "--execution", "compiled"),
        "uneven": (models["uneven"], *GREEDY, *split),
        "whole": (models["llada"], *GREEDY),
        "stdin": (models["llada"], "--jsonl", "-", *split),
        "adapter": (models["adapter"], *GREEDY, *split),
        "mapped": (models["llada"], *shared, "--device-map", "auto"),
        **{
            f"shared {name}": (models[name], *shared, "--seed", 5, "--output", root / f"{name}.jsonl", "--json")
            for name in SHARED_MODELS
        },
        "unseeded": (models["llada"], *shared, "--set", "num_return_sequences=2"),
        **{
            f"measured {name}": (models[name], "--perplexity", root / "text.txt", *MEASURED)
            for name in ("llada", "qwen3")
        },
        **{
            name: (models["llada"], *shared, "--seed", 5, "--output", root / "resumed.jsonl", *more)
            for name, more in ((tp_worker.INTERRUPTED, ()), ("forgotten", ()), ("resumed", ("--resume", "--json")))
        },
        "bad line": (models["llada"], *bad, "--seed", 5, "--output", root / "bad.out"),
        tp_worker.FAILING: (models["llada"], *shared, "--seed", 5, "--output", root / "failed.jsonl"),
    }
    return run_together(root, models, commands, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Together:
    """Two groups of two, each with a model."""
    root = tmp_path_factory.mktemp("four")
    shared = (*write_shared(root), "--tp", 2)
    commands: dict[str, tuple[Any, ...]] = {
        **{
            f"shared {name}": (models[name], *shared, "--seed", 5, "--output", root / f"{name}.jsonl", "--json")
            for name in SHARED_MODELS
        },
        "unseeded": (models["qwen3"], *shared),
        **{
            f"measured {name}": (models[name], "--perplexity", root / "text.txt", *MEASURED, "--tp", 2)
            for name in ("llada", "qwen3")
        },
        "odd": (models["llada"], *shared[:-1], 3),
        "one prompt": (models["llada"], *GREEDY, "--tp", 2),
        "cut head": (models["uneven"], *shared),
    }
    return run_together(root, models, commands, 4)


def write_shared(root: Path) -> tuple[Any, ...]:
    """A file of prompts, one of a text, and the words that sample the first."""
    (root / "shared.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SHARED))
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 2)
    return ("--jsonl", root / "shared.jsonl", *SAMPLED)


def run_together(
    root: Path, models: dict[str, Path], commands: dict[str, tuple[Any, ...]], processes: int
) -> Together:
    words = {
        name: ["eval" if name.startswith("measured") else "generate", *map(str, command)]
        for name, command in commands.items()
    }
    (root / "commands.json").write_text(json.dumps(words))
    reports = launch("tests.cli.tp_worker", root, processes)
    assert reports.keys() == words.keys(), reports
    return Together(root, models, {name: [Said(*json.loads(one)) for one in all_] for name, all_ in reports.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED_MODELS)
def test_two_processes_share_the_rows_of_a_file(two: Together, cli: Cli, tmp_path: Path, name: str) -> None:
    """Each samples a part, and the first one writes what one process writes."""
    first, second = two.said[f"shared {name}"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    output = tmp_path / "out.jsonl"
    alone = cli.report(
        two.models[name], "--jsonl", two.root / "shared.jsonl", *SAMPLED, "--seed", 5, "--output", output
    )
    assert (two.root / f"{name}.jsonl").read_text() == output.read_text()
    report = json.loads(first.out)
    assert [report[key] for key in ("prompts", "tokens")] == [alone[key] for key in ("prompts", "tokens")]
    if name == "qwen3":  # batches are the same, and each process ran some
        assert report["forwards"] == alone["forwards"]
        assert sorted([len(first.drawn), len(second.drawn)]) == [2, 3]
    assert (second.out, second.err) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED_MODELS)
def test_groups_of_processes_share_the_rows_of_a_file(four: Together, cli: Cli, tmp_path: Path, name: str) -> None:
    """Each has a tensor-parallel model and a part of the rows; the first process writes what one alone does."""
    said = four.said[f"shared {name}"]
    assert [one.code for one in said] == [0] * 4, said
    output = tmp_path / "out.jsonl"
    alone = cli.report(
        four.models[name], "--jsonl", four.root / "shared.jsonl", *SAMPLED, "--seed", 5, "--output", output
    )
    assert (four.root / f"{name}.jsonl").read_text() == output.read_text()
    report = json.loads(said[0].out)
    assert [report[key] for key in ("prompts", "tokens")] == [alone[key] for key in ("prompts", "tokens")]
    assert [(one.out, one.err) for one in said[1:]] == [("", "")] * 3
    if name == "qwen3":
        assert report["forwards"] == alone["forwards"]
        assert said[0].drawn == said[1].drawn != said[2].drawn == said[3].drawn


@pytest.mark.slow
def test_without_a_seed_a_group_draws_the_same(four: Together) -> None:
    said = four.said["unseeded"]
    assert [one.code for one in said] == [0] * 4, said
    assert said[0].drawn == said[1].drawn != said[2].drawn == said[3].drawn
    assert len(said[0].out.splitlines()) == len(SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llada", "qwen3"])
def test_groups_of_processes_measure_what_one_measures(
    four: Together, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = four.said[f"measured {name}"]
    assert [one.code for one in said] == [0] * 4, said
    alone = measured(four, name, monkeypatch, capsys)["perplexity"]
    together = json.loads(said[0].out)
    assert together["perplexity"] == {
        key: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value for key, value in alone.items()
    }
    assert together["settings"]["processes"] == 2
    assert [(one.out, one.err) for one in said[1:]] == [("", "")] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED_GROUPS)
def test_groups_that_cannot_be_are_refused(four: Together, name: str) -> None:
    for said in four.said[name]:
        assert said.code == 2
        assert said.err.startswith("dlm-bridge: --tp: ")
        assert REFUSED_GROUPS[name] in said.err
        assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.slow
def test_without_a_seed_no_two_rows_of_a_prompt_are_the_same(two: Together) -> None:
    """Even where two processes draw them."""
    first, second = two.said["unseeded"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    rows = [json.loads(line) for line in first.out.splitlines()]
    assert [row["id"] for row in rows] == [1, 1, 5, 5, 2, 2, 1, 1, 4, 4]
    assert len({row["text"] for row in rows if row["id"] == 1}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llada", "qwen3"])
def test_two_processes_measure_what_one_measures(
    two: Together, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the bit: each computes every other of one process's batches."""
    first, second = two.said[f"measured {name}"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    alone, together = measured(two, name, monkeypatch, capsys), json.loads(first.out)
    assert together["perplexity"] == alone["perplexity"]
    assert together["perplexity"]["windows"] > 2
    assert (alone["settings"]["processes"], together["settings"]["processes"]) == (1, 2)
    assert (second.out, second.err) == ("", "")


def measured(
    run: Together, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """What one process measures."""
    words = ["dlm-bridge", "eval", run.models[name], "--perplexity", run.root / "text.txt", *MEASURED]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.slow
def test_an_interrupted_file_of_prompts_is_resumed(two: Together) -> None:
    """Each process has kept what it had done: the output is that of an uninterrupted command."""
    for number, said in enumerate(two.said[tp_worker.INTERRUPTED]):
        assert (said.code, said.err.count("\n")) == (130, 1)
        assert "resumed.jsonl.partial" in said.err, number
    for said in two.said["forgotten"]:
        assert said.code == 2
        assert "resumed.jsonl.partial" in said.err
    first, second = two.said["resumed"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (two.root / "resumed.jsonl").read_text() == (two.root / "llada.jsonl").read_text()
    whole, resumed = (json.loads(two.said[name][0].out) for name in ("shared llada", "resumed"))
    assert resumed["tokens"] == whole["tokens"]
    assert not list(two.root.glob("resumed.jsonl.partial*"))


@pytest.mark.slow
def test_a_line_that_fails_ends_no_process(two: Together) -> None:
    """Each keeps the rows of its share."""
    for said in two.said["bad line"]:
        assert (said.code, len(said.drawn)) == (2, 1)
        assert "bad.jsonl:2: contains the mask token" in said.err
    assert not (two.root / "bad.out").exists()
    parts = sorted(two.root.glob("bad.out.partial*"))
    assert [len(part.read_text().splitlines()) for part in parts] == [1, 1]


@pytest.mark.slow
def test_a_process_that_fails_ends_all_by_its_name(two: Together) -> None:
    """The others' rows stay."""
    first, second = two.said[tp_worker.FAILING]
    assert (first.code, second.code) == (2, 2)
    assert second.err == "dlm-bridge: a row of this share cannot be sampled (rank 1)\n"
    assert first.err.startswith("dlm-bridge: rank 1: ended before its rows were done")
    assert [path.name for path in two.root.glob("*failed*")] == ["failed.jsonl.partial"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llada", "sdar", "llada2", "qwen3"])
def test_two_processes_say_what_one_says(two: Together, cli: Cli, name: str) -> None:
    """With the family's own cache; and only the first one says it."""
    first, second = two.said[f"greedy {name}"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.drawn == second.drawn
    alone = cli.report(two.models[name], *GREEDY)
    assert first.drawn[0] == alone["samples"][0]["token_ids"]
    assert first.out == alone["samples"][0]["text"] + "\n"
    assert re.search(rf"^{alone['tokens']} tokens in .*, {alone['forwards']} forward passes", first.err, re.MULTILINE)
    assert (second.out, second.err) == ("", "")


@pytest.mark.slow
def test_compiled_shards_write_the_same(two: Together) -> None:
    for said, eager in zip(two.said["compiled"], two.said["greedy llada"], strict=True):
        assert said.code == 0, said.err
        assert said.drawn == eager.drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llada", "sdar", "llada2", "qwen3"])
def test_without_a_seed_all_processes_draw_the_same(two: Together, name: str) -> None:
    first, second = two.said[f"drawn {name}"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.drawn == second.drawn != two.said[f"greedy {name}"][0].drawn
    assert len(first.drawn[0]) == 16


@pytest.mark.slow
def test_a_seed_says_what_it_says_in_one_process(two: Together, cli: Cli) -> None:
    first, second = two.said["seeded"]
    assert first.drawn == second.drawn
    alone = cli.report(two.models["sdar"], *DRAWN, "--seed", "5")
    reported = json.loads(first.out)
    assert {**reported, "seconds": 0} == {**alone, "seconds": 0}
    assert second.out == ""


@pytest.mark.slow
def test_who_watches_changes_nothing(two: Together) -> None:
    """The first process alone watches, and writes the page."""
    first, second = two.said["watched"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.drawn == second.drawn == two.said["seeded"][0].drawn
    assert "committed" in Page((two.root / "page.html").read_text("utf-8")).text
    assert (second.out, second.err) == ("", "")


@pytest.mark.slow
def test_a_file_of_prompts_is_written_once(two: Together, cli: Cli, tmp_path: Path) -> None:
    first, second = two.said["file"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    words = (
        "--jsonl",
        two.root / "in.jsonl",
        "--output",
        tmp_path / "out.jsonl",
        "--batch-size",
        2,
        *LONG,
        "--temperature",
        "2",
    )
    alone = cli.report(two.models["llada"], *words, "--seed", 5)
    assert {**json.loads(first.out), "seconds": 0} == {**alone, "seconds": 0}
    assert (two.root / "out.jsonl").read_text() == (tmp_path / "out.jsonl").read_text()
    assert (second.out, second.err) == ("", "")
    assert first.drawn == second.drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused(two: Together, name: str) -> None:
    for said in two.said[name]:
        assert said.code == 2
        assert REFUSED[name] in said.err
        assert said.err.count("\n") == 1
        assert said.out == ""


# ------------------------------------------------------------------------------------------------- a device map


@pytest.mark.parametrize("name", ["llada", "sdar", "llada2", "qwen3"])
@pytest.mark.fast("llada2", "qwen3")
def test_a_device_map_changes_no_token(models: dict[str, Path], cli: Cli, tmp_path: Path, name: str) -> None:
    """Half of the layers are on the disk."""
    config = json.loads((models[name] / "config.json").read_text())
    count = config.get("num_hidden_layers") or config["n_layers"]
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {f"model.layers.{layer}": "disk" if layer % 2 else "cpu" for layer in range(count)}
    spread = ("--device-map", json.dumps(places), "--offload-folder", tmp_path / "offload")
    report = cli.report(models[name], *GREEDY, *spread)
    alone = cli.report(models[name], *GREEDY)
    assert report["samples"] == alone["samples"]
    assert cli.report(models[name], *GREEDY, "--device-map", "auto")["samples"] == alone["samples"]
