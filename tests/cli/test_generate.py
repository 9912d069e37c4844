"""`dlm-bridge generate` as a user meets it: both kinds of model, files of prompts, what is refused."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlm_bridge import Bridge, Layout
from dlm_bridge.cli import generate_run
from dlm_bridge.cli.app import main
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation import DiffusionGenerationConfig
from dlm_bridge.generation.offline import PromptSampler
from dlm_bridge.generation.options import COMMAND_LINE as SETTINGS
from dlm_bridge.generation.request import Ended
from dlm_bridge.loading import load_model
from tests.checkpoints import write_tokenizer
from tests.cli.conftest import MASK, TOKENIZER, Cli


def by_hand(folder: Path, prompt: str, **settings: Any) -> list[int]:
    """The new tokens that the model itself gives, of a plain prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    return model.generate(ids, **settings)[0, ids.shape[1] :].tolist()


# ------------------------------------------------------------------------------------------------- one prompt


def test_a_diffusion_model_is_sampled_with_the_settings_that_are_given(cli: Cli, llada: Path) -> None:
    words = ["--prompt", "the cat", "--gen-length", 16, "--block-length", 8, "--steps", 8, "--temperature", 0.7]
    report = cli.report(llada, *words, "--seed", 3, "--set", "remasking=random", "--set", "eos_token_id=None")
    settings = {"gen_length": 16, "block_length": 8, "steps": 8, "temperature": 0.7, "seed": 3}
    assert report["samples"][0]["token_ids"] == by_hand(
        llada, "the cat", **settings, remasking="random", eos_token_id=None
    )
    assert (report["tokens"], report["forwards"], report["tokens_per_forward"]) == (16, 8, 2.0)
    assert report["family"] == "llada"
    assert report["seconds"] > 0
    code, _, err = cli(llada, *words, "--seed", 3)
    assert code == 0
    line = r"^\d+ tokens in \S+ s \(\d+(\.\d)? tokens/s\), \d+ forward passes of \S+ tokens per row$"
    assert re.search(line, err.strip())


@pytest.mark.parametrize("name", ["llada", "qwen3"])
def test_the_number_of_tokens_has_two_names(cli: Cli, name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    texts = [cli(folder, "--prompt", "the cat", flag, 8)[1] for flag in ("--gen-length", "--max-new-tokens")]
    assert texts[0] == texts[1] != cli(folder, "--prompt", "the cat", "--max-new-tokens", 16)[1]


def test_an_autoregressive_model_goes_to_transformers_own_generate(cli: Cli, qwen3: Path) -> None:
    greedy = cli.report(qwen3, "--prompt", "the cat", "--gen-length", 12, "--temperature", 0)
    assert greedy["samples"][0]["token_ids"] == by_hand(qwen3, "the cat", max_new_tokens=12, do_sample=False)
    assert (greedy["tokens"], greedy["forwards"], greedy["tokens_per_forward"]) == (12, 12, 1.0)
    state = torch.random.get_rng_state()
    drawn = ["--prompt", "the cat", "--gen-length", 12, "--temperature", 1.5, "--top-k", 50, "--seed", 1]
    first, again = cli.report(qwen3, *drawn), cli.report(qwen3, *drawn)
    assert first["samples"] == again["samples"] != greedy["samples"]
    assert torch.equal(torch.random.get_rng_state(), state)
    two = cli.report(qwen3, *drawn, "--set", "num_return_sequences=2")
    assert len({tuple(sample["token_ids"]) for sample in two["samples"]}) == 2


@pytest.mark.parametrize(("name", "context"), [("llada", 256), ("qwen3", 128)])
def test_a_default_length_is_shortened_to_the_context(
    cli: Cli, name: str, context: int, request: pytest.FixtureRequest
) -> None:
    folder, prompt = request.getfixturevalue(name), "a" * (context - 20)
    words = (folder, "--prompt", prompt, "--set", "eos_token_id=null")
    assert len(cli.report(*words)["samples"][0]["token_ids"]) == 20
    code, _, err = cli(*words, "--gen-length", 128)
    assert code == 2
    assert str(context) in err


def test_a_chat_goes_through_the_template(cli: Cli, qwen3: Path) -> None:
    words = ["--prompt", "hi", "--gen-length", 8, "--temperature", 0]
    report = cli.report(qwen3, "--chat", "--system", "be kind", *words)
    plain = cli.report(qwen3, "--prompt", "system: be kind\nuser: hi\nassistant: ", *words[2:])
    assert report["samples"] == plain["samples"]


def test_the_chat_template_gets_its_variables(cli: Cli, qwen3: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    tokenizer.chat_template = "{{ mood }}{{ 1 if loud is true else 0 }}: {{ messages[-1].content }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    sampled = ["--gen-length", 6, "--temperature", 0, "--tokenizer", tmp_path / "tokenizer"]
    given = ["--chat-template-args", "loud=true", "--chat-template-args", "mood=glad"]
    expected = cli.report(qwen3, "--prompt", "glad1: hi", *sampled)["samples"]
    assert cli.report(qwen3, "--chat", "--prompt", "hi", *given, *sampled)["samples"] == expected
    rows = [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, err = cli(qwen3, "--jsonl", tmp_path / "in.jsonl", "--chat", *given, *sampled)
    assert code == 0, err
    assert [json.loads(line)["token_ids"] for line in out.splitlines()] == [expected[0]["token_ids"]] * 2


def test_a_megatron_checkpoint_is_sampled_as_its_hub_model(cli: Cli, llada: Path, tmp_path: Path) -> None:
    Bridge.from_hf(llada).to_megatron(tmp_path / "megatron", Layout(tp=2))
    words = ["--prompt", "the cat", "--gen-length", 8, "--seed", 1]
    ours = cli.report(tmp_path / "megatron", *words)
    assert ours["samples"] == cli.report(llada, *words)["samples"]
    assert ours["family"] == "llada"


@pytest.mark.parametrize("name", ["llada", "qwen3"])
def test_an_adapter_is_sampled_on_its_base(
    cli: Cli, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from peft import LoraConfig, get_peft_model

    folder = request.getfixturevalue(name)
    torch.manual_seed(1)
    # `init_lora_weights=False`: an adapter that changes something.
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).eval()
    peft.save_pretrained(tmp_path / "adapter")
    words = ["--prompt", "the cat", "--gen-length", 8, "--temperature", 0]
    found = cli.report(tmp_path / "adapter", *words)
    peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = cli.report(tmp_path / "merged", *words, "--tokenizer", folder)
    assert found["samples"] == merged["samples"] != cli.report(folder, *words)["samples"]
    assert found["family"] == name
    settings = tmp_path / "adapter/adapter_config.json"
    settings.write_text(settings.read_text().replace(str(folder), str(tmp_path / "gone")))
    code, _, err = cli(tmp_path / "adapter", *words)
    assert code == 2
    assert "gone: no such folder" in err
    assert err.count("\n") == 1


def test_weights_on_the_disk_give_the_same_text(cli: Cli, llada: Path, tmp_path: Path) -> None:
    places = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    places |= {f"model.layers.{layer}": "disk" if layer % 2 else "cpu" for layer in range(4)}
    words = ["--prompt", "the cat", "--gen-length", 8]
    offloaded = cli.report(
        llada, *words, "--device-map", json.dumps(places), "--offload-folder", tmp_path / "disk", "--dtype", "fp32"
    )
    assert offloaded["samples"] == cli.report(llada, *words, "--device", "cpu")["samples"]


def test_spans_of_a_prompt_are_filled(cli: Cli, llada: Path, tmp_path: Path) -> None:
    prompt = "the [MASK:4] cat[MASK]"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llada), AutoTokenizer.from_pretrained(llada)
    first, second = (tokenizer(text)["input_ids"] for text in ("the ", " cat"))
    ids = [*first, *[MASK] * 4, *second, MASK]
    expected = model.generate(torch.tensor([ids]), infill=True, seed=0)[0].tolist()
    words = ["--infill", "--seed", 0]
    report = cli.report(llada, "--prompt", prompt, *words)
    sample = report["samples"][0]
    assert sample["token_ids"] == expected
    assert sample["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert report["tokens"] == 5
    # In a file, beside a longer one; and of another length.
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": prompt}, {"prompt": "something longer than that is [MASK:2] filled as well"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, out, _ = cli(llada, "--jsonl", source, *words)
    written = [json.loads(line) for line in out.splitlines()]
    assert written[0]["token_ids"] == expected
    assert [row["tokens"] for row in written] == [5, 2]
    lengths = ["--set", "span_lengths=[3, 6]"]
    longer = cli.report(llada, "--prompt", "the [MASK] cat", *words, *lengths)
    assert longer["tokens"] in (3, 6)
    assert len(longer["samples"][0]["token_ids"]) == len(first) + len(second) + longer["tokens"]
    _, out, _ = cli(llada, "--jsonl", source, *words, *lengths)
    in_file = [json.loads(line) for line in out.splitlines()]
    assert in_file[0]["tokens"] in (6, 9, 12)
    assert in_file[1]["tokens"] in (3, 6)
    assert "nothing to fill in" in cli(llada, "--prompt", "x", *words)[2]


def test_the_usual_settings_are_fields_of_the_configuration() -> None:
    config = DiffusionGenerationConfig()
    assert all(hasattr(config, name) for name in SETTINGS)


# ------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["llada", "qwen3"])
def test_a_file_of_prompts_is_sampled_in_batches(
    cli: Cli, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name)
    texts = ["the cat", "a much longer line than that", "x", "the", "12 + 7"]
    rows = [{"prompt": text, "id": number} for number, text in enumerate(texts)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    words = ["--gen-length", 8, "--temperature", 0]
    report = cli.report(folder, "--jsonl", source, "--batch-size", 2, "--output", target, *words)
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["id"], row["prompt"]) for row in written] == list(enumerate(texts))
    for row in written:
        alone = cli.report(folder, "--prompt", row["prompt"], *words)
        assert row["token_ids"] == alone["samples"][0]["token_ids"], row
        assert (row["text"], row["tokens"]) == (alone["samples"][0]["text"], alone["tokens"])
    assert report["prompts"] == 5
    assert report["tokens"] == sum(row["tokens"] for row in written)
    assert report["forwards"] == sum(row["forwards"] for row in written[::2])  # three batches
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_commit_steps_are_those_of_each_rows_denoising(cli: Cli, llada: Path, qwen3: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = ["the cat", "a much longer line than that", "x"]
    source.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    words = ["--gen-length", 8, "--steps", 6, "--set", "block_length=4"]
    plain = cli(llada, "--jsonl", source, *words)[1]
    assert cli(llada, "--jsonl", source, *words, "--commit-steps", "--output", target)[0] == 0
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["token_ids"] for row in written] == [json.loads(line)["token_ids"] for line in plain.splitlines()]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llada), AutoTokenizer.from_pretrained(llada)
    for text, row in zip(texts, written, strict=True):
        ids = tokenizer(text)["input_ids"]
        output = model.generate(
            torch.tensor([ids]), gen_length=8, steps=6, block_length=4, output_history=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        steps = [0] * 8
        for step in output.history:
            for place in step.committed[0, len(ids) :].nonzero()[:, 0].tolist():
                steps[place] = step.forwards
        assert row["prompt_token_ids"] == ids
        assert row["commit_steps"] == steps[: len(row["token_ids"])]
        assert len(set(steps)) == 6
    refusals = [(["--prompt", "x"], "--jsonl")]
    refusals += [(["--jsonl", source, *infill], "--infill") for infill in (["--infill"], ["--set", "infill=true"])]
    for options, named in refusals:
        code, _, err = cli(llada, *options, "--commit-steps")
        assert code == 2
        assert named in err
    code, _, err = cli(qwen3, "--jsonl", source, "--gen-length", 4, "--commit-steps")
    assert code == 2
    assert "--commit-steps" in err


def test_a_seed_gives_a_file_the_same_texts_in_batches_of_any_size(cli: Cli, llada: Path, tmp_path: Path) -> None:
    """A prompt that comes twice is continued in two ways, whether both are in one batch or not."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "two", "one", "three")))
    words = ["--jsonl", source, "--output", target, "--overwrite", "--gen-length", 8, "--temperature", 1, "--seed", 3]
    found = []
    for size in (1, 3, 4):
        assert cli(llada, *words, "--batch-size", size, "--set", "num_return_sequences=2")[0] == 0
        found.append([json.loads(line)["token_ids"] for line in target.read_text().splitlines()])
    assert found[0] == found[1] == found[2]
    assert len({tuple(ids) for ids in found[0]}) == 8
    report = cli.report(llada, "--prompt", "two", "--gen-length", 8, "--temperature", 1, "--seed", 3)
    assert report["samples"][0]["token_ids"] == found[0][2]


def test_batches_of_an_autoregressive_model_draw_anew(cli: Cli, qwen3: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join([json.dumps({"prompt": "one"})] * 3))
    words = ["--gen-length", 8, "--temperature", 1, "--seed", 3]
    code, out, _ = cli(qwen3, "--jsonl", source, *words, "--batch-size", 1)
    assert code == 0
    found = [json.loads(line)["token_ids"] for line in out.splitlines()]
    assert len({tuple(ids) for ids in found}) == 3
    assert cli.report(qwen3, "--prompt", "one", *words)["samples"][0]["token_ids"] == found[0]
    assert cli(qwen3, "--jsonl", source, *words, "--batch-size", 1)[1] == out


@pytest.mark.parametrize("name", ["llada", "qwen3"])
def test_a_row_that_a_stop_string_ends_has_no_padding(
    cli: Cli, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name)
    words = ["--gen-length", 16, "--temperature", 0, "--set", "eos_token_id=None", "--set", "pad_token_id=5"]
    texts = ["the cat", "12 + 7", "x"]
    full = [cli.report(folder, "--prompt", text, *words)["samples"][0] for text in texts]
    stop = next(letter for letter in full[0]["text"] if letter.isprintable() and letter != "\ufffd")
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    code, out, err = cli(folder, "--jsonl", source, *words, "--set", f"stop_strings={json.dumps(stop)}")
    assert code == 0, err
    written = [json.loads(line) for line in out.splitlines()]
    for row, whole in zip(written, full, strict=True):
        assert row["token_ids"] == whole["token_ids"][: row["tokens"]]
        assert row["text"].count(stop) == (stop in whole["text"])
    assert 1 <= written[0]["tokens"] < 16
    assert max(row["tokens"] for row in written) > written[0]["tokens"]  # so that the first row was padded


def test_messages_and_stdin(cli: Cli, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    rows = [{"messages": [{"role": "user", "content": content}]} for content in ("hi", parts)] + [{"question": "hi"}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(map(json.dumps, rows))))
    words = ["--gen-length", 6, "--temperature", 0, "--field", "question", "--chat"]
    code, out, err = cli(qwen3, "--jsonl", "-", *words)
    assert code == 0, err
    first, joined, second = map(json.loads, out.splitlines())
    assert first["text"] == joined["text"] == second["text"]
    assert first["messages"] == rows[0]["messages"]
    assert second["prompt"] == second["question"] == "hi"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "url": "bridge.png"},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "input_audio"},
        "what?",
        {"type": "text", "text": None},
    ],
)
def test_a_part_of_a_message_that_is_no_text_is_refused(cli: Cli, qwen3: Path, tmp_path: Path, part: Any) -> None:
    """The template of this tokenizer, as many, would write it out as text."""
    source = tmp_path / "in.jsonl"
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}, part]}
    source.write_text(json.dumps({"messages": [{"role": "system", "content": "be brief"}, message]}))
    code, out, err = cli(qwen3, "--jsonl", source, "--gen-length", 6)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{source}:1: {qwen3}: message 2 " in err


def test_a_line_that_cannot_be_sampled_fails_alone(cli: Cli, llada: Path, qwen3: Path, tmp_path: Path) -> None:
    """The others are sampled as without it."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    words = ["--jsonl", source, "--batch-size", 1]
    short = ["--gen-length", 8, "--temperature", 0]
    few = {llada: ["--steps", 8], qwen3: []}  # forward passes
    cases = [(llada, "x" * 500, "beyond the model's context of 256"), (llada, "<mask>", "mask token 259")]
    cases += [(qwen3, "x" * 500, "beyond the model's context of 128"), (qwen3, "", "--unconditional")]
    for folder, bad, said in cases:
        for more in (
            short,
            [*few[folder], "--temperature", 0] if "x" in bad else short,
        ):  # by default, a length that fits the others
            source.write_text("\n\n".join(json.dumps({"prompt": text}) for text in ("short", "other")))
            expected = cli(folder, *words, *more)[1].splitlines()
            source.write_text("\n\n".join(json.dumps({"prompt": text}) for text in ("short", bad, "other", bad)))
            code, out, err = cli(folder, *words, *more)
            assert (code, err.count("\n")) == (2, 1), err
            assert out.splitlines() == expected
            assert f"{source}:3, {source}:7: " in err
            assert "2 of 4 rows failed" in err
            assert said in err
            assert ("--infill" in err) == ("<mask>" in bad)
    source.write_text(json.dumps({"prompt": "x" * 500}))
    assert cli(llada, *words, *short, "--output", target)[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    source.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    assert f"{source}:1: {llada}: the tokenizer has no chat template" in cli(llada, *words, *short)[2]


def test_failed_lines_are_named_so_that_one_correction_is_enough() -> None:
    prompts = [generate_run.WrittenPrompt(text="x", where=f"in.jsonl:{number}") for number in range(20)]
    for count in (1, 3, 5, 20):
        error = generate_run._failure({prompt.where: "too long" for prompt in prompts[:count]}, prompts, None)
        named = [prompt.where for prompt in prompts if re.search(rf"{prompt.where}\b", str(error))]
        assert named == [prompt.where for prompt in prompts[: min(count, 13)]]


@pytest.mark.parametrize("remedy", ["corrected", "removed"])
@pytest.mark.fast("corrected")
def test_a_file_with_a_bad_line_is_resumed_without_it(cli: Cli, llada: Path, tmp_path: Path, remedy: str) -> None:
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"

    def write(*texts: str) -> None:
        source.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))

    words = ["--jsonl", source, "--gen-length", 8, "--temperature", 1, "--seed", 3, "--batch-size", 1]
    words += ["--set", "num_return_sequences=2", "--set", "eos_token_id=null"]
    good = ("one", "good", "two", "one") if remedy == "corrected" else ("one", "two", "one")
    write(*good)
    uninterrupted = cli.report(llada, *words, "--output", whole)
    write("one", "a <mask>", "two", "one")
    words += ["--output", target]
    code, _, err = cli(llada, *words)
    assert (code, err.count("\n")) == (2, 1), err
    assert f"{source}:2: contains the mask token 259" in err
    assert f"{target}.partial" in err
    assert not target.exists()
    assert len(Path(f"{target}.partial").read_text().splitlines()) == 6
    write("others", "than", "those")
    assert cli(llada, *words, "--resume")[0] == 2
    write(*good)
    report = cli.report(llada, *words, "--resume")
    assert target.read_text() == whole.read_text()
    assert not Path(f"{target}.partial").exists()
    assert report["forwards"] < uninterrupted["forwards"]
    assert (report["forwards"] == 0) == (remedy == "removed")


def test_a_line_whose_logits_are_not_finite_fails_alone(
    cli: Cli, llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "tw*", "three")))
    words = (llada, "--jsonl", source, "--gen-length", 8, "--temperature", 0)
    expected = [json.loads(line) for line in cli(*words)[1].splitlines()]
    star = AutoTokenizer.from_pretrained(llada)("*")["input_ids"][0]

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        loaded = load_model(*args, **kwargs)
        embedding = loaded.model.get_input_embeddings()

        def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output.masked_fill((inputs[0] == star)[..., None], torch.nan)

        embedding.register_forward_hook(hook)
        return loaded

    monkeypatch.setattr(generate_run, "load_model", spoiled)
    code, out, err = cli(*words)
    assert (code, err.count("\n")) == (2, 1), err
    assert f"{source}:2: the model's logits are NaN" in err
    assert [json.loads(line)["token_ids"] for line in out.splitlines()] == [
        expected[place]["token_ids"] for place in (0, 2)
    ]
    code, _, err = cli(*words, "--output", target)
    assert (code, target.exists()) == (2, False)
    kept = [json.loads(line) for line in Path(f"{target}.partial").read_text().splitlines()]
    assert {row["prompt"] for row in kept} == {"one", "three"}


def test_the_batch_size_that_memory_allows(cli: Cli, llada: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "a longer one", "x")))
    words = ["--jsonl", source, "--output", target, "--overwrite", "--gen-length", 8]
    found = []
    for size in (1, "auto"):
        code, _, err = cli(llada, *words, "--batch-size", size)
        assert code == 0
        found.append(target.read_text())
    assert found[0] == found[1]
    assert err.splitlines()[0].startswith("batch size 3: a row of 20 tokens takes ")
    for size in ("0", "-1", "many", "1.5"):
        code, _, err = cli(llada, *words, "--batch-size", size)
        assert code == 2
        assert err.startswith("dlm-bridge: --batch-size: ")
        assert size in err


@pytest.mark.parametrize("name", ["llada", "qwen3"])
@pytest.mark.fast("llada")
def test_an_interrupted_file_of_prompts_is_resumed(
    cli: Cli, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Finished rows, in the order in which they ended, stay in OUT.partial; the output has the input's order."""
    folder = request.getfixturevalue(name)
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    texts = ["one", "the longest of these", "one", "a longer one"]
    rows = [{"prompt": text, "id": number, "_partial": "the user's"} for number, text in enumerate(texts)]
    source.write_text("\n".join(map(json.dumps, rows)))
    words = ["--jsonl", source, "--batch-size", 1, "--gen-length", 8, "--temperature", 1, "--seed", 3]
    words += ["--set", "num_return_sequences=2", "--set", "eos_token_id=None"]
    uninterrupted = cli.report(folder, *words, "--output", whole)
    words += ["--output", target]
    sampled: list[Any] = []

    def interrupt(call: Any, after: int) -> Any:
        def rows_of(*args: Any, **kwargs: Any) -> Any:
            for row in call(*args, **kwargs):
                if len(sampled) == after:
                    raise KeyboardInterrupt
                sampled.append(row)
                yield row

        return rows_of

    with monkeypatch.context() as patch:
        patch.setattr(generate_run, "_rows", interrupt(generate_run._rows, 3))
        code, _, err = cli(folder, *words)
        assert (code, err.count("\n")) == (130, 1), err
        assert str(partial) in err
        assert "--resume" in err
        assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "whole.jsonl", partial.name}
        finished = [json.loads(line) for line in partial.read_text().splitlines()]
        expected = [json.loads(line) for line in whole.read_text().splitlines()]
        for (index, facts), row in zip(sampled, finished, strict=True):
            assert {**row, "_partial": None} == {**expected[index], "_partial": None}
            assert row["token_ids"] == list(facts["token_ids"])
        # Nothing is lost by who forgets --resume, and nothing of another call is taken.
        for more in ([], ["--resume", "--seed", 4], ["--resume", "--gen-length", 4], ["--resume", "--dtype", "bf16"]):
            before = partial.read_text()
            code, _, err = cli(folder, *words, *more)
            assert (code, err.count("\n")) == (2, 1), err
            assert str(partial) in err
            assert partial.read_text() == before
        # A line that was cut off, as by a full disk, is sampled again.
        partial.write_text(partial.read_text()[:-20])
        sampled.clear()
        patch.undo()
        patch.setattr(generate_run, "_rows", interrupt(generate_run._rows, 100))
        report = cli.report(folder, *words, "--resume")
    assert target.read_text() == whole.read_text()
    assert not partial.exists()
    indices = [index for index, _ in sampled]
    assert len(indices) == len(set(indices)) == 6
    assert (report["tokens"], report["prompts"]) == (uninterrupted["tokens"], uninterrupted["prompts"])
    assert report["forwards"] < uninterrupted["forwards"]


def test_who_does_not_resume_begins_anew(cli: Cli, llada: Path, tmp_path: Path) -> None:
    source, target, partial = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "out.jsonl.partial"))
    source.write_text(json.dumps({"prompt": "one"}))
    words = [llada, "--jsonl", source, "--output", target, "--gen-length", 8]
    assert cli(*words, "--resume")[0] == 0  # there is nothing yet
    written = target.read_text()
    for name in (partial, tmp_path / "out.jsonl.partial.3"):
        name.write_text("{}\n")
    assert cli(*words, "--overwrite")[0] == 0
    assert target.read_text() == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_sampling_that_fails_leaves_what_is_finished(
    cli: Cli, llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "two")))
    calls: list[Any] = []

    sampled = PromptSampler.__iter__

    def failing(sampler: PromptSampler) -> Iterator[Ended]:
        for row in sampled(sampler):
            calls.append(row)
            if len(calls) == 2:
                raise DlmBridgeError(None, "the second row fails")
            yield row

    monkeypatch.setattr(PromptSampler, "__iter__", failing)
    code, _, err = cli(llada, "--jsonl", source, "--output", target, "--batch-size", 1, "--gen-length", 8)
    assert (code, len(calls)) == (2, 2)
    assert "the second row fails" in err
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl.partial"}


def test_a_full_stdout_is_one_line(
    llada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    words = ["generate", str(llada), "--jsonl", str(tmp_path / "in.jsonl"), "--gen-length", "4"]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["dlm-bridge", *words])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert exit_.value.code == 2
        _one_line_of_a_full_stdout(capsys.readouterr().err)


def test_a_stdout_that_is_full_at_the_end_is_one_line() -> None:
    """Where Python would write what is left when it ends."""
    command = [sys.executable, "-m", "dlm_bridge.cli", "--version"]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 2
    _one_line_of_a_full_stdout(found.stderr)


def _one_line_of_a_full_stdout(err: str) -> None:
    assert err.count("\n") == 1, err
    assert "No space left on device" in err


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "field", "named"),
    [
        ([], "--prompt", "--jsonl"),
        (["--prompt", "x", "--jsonl", "f"], "--prompt", "--jsonl"),
        (["--jsonl", "f", "--show"], "--show", "--jsonl"),
        (["--jsonl", "f", "--json"], "--json", "--output"),
        (["--jsonl", "f", "--resume"], "--resume", "--output"),
        (["--jsonl", "/nowhere.jsonl"], "/nowhere.jsonl", "No such file"),
        (["--prompt", "x", "--system", "y"], "--system", "--chat"),
        (["--prompt", "x", "--chat", "--chat-template-args", "a"], "--chat-template-args", "a: "),
        (["--prompt", "x", "--chat", "--chat-template-args", "tokenize=1"], "--chat-template-args", "tokenize"),
        (["--prompt", "x", "--chat"], "", "chat_template.jinja"),
        (["--prompt", "x", "--gen-length", "0"], "--gen-length", "0"),
        (["--prompt", "x", "--set", "remaskng=random"], "remaskng", "remasking"),
        (["--prompt", "x", "--set", "remasking"], "--set", "remasking"),
        (["--prompt", "x", "--set", "attention_mask=1"], "--set", "attention_mask"),
        (["--prompt", "a[MASK:0]b", "--infill"], "--prompt", "[MASK:0]"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature", "nan"),
        (["--prompt", "x", "--cache", "block"], "--cache", "prefix"),
        (["--prompt", "x", "--algorithm", "sdar"], "--algorithm", "block_causal"),
        (["--prompt", "<mask>x"], "--prompt", "259"),
        (["--prompt", "x", "--set", "seed=1", "--set", "seed=2"], "--set", "seed"),
        (["--prompt", "x", "--set", "seed=1", "--seed", "1"], "--seed", "--set"),
        (["--prompt", "x", "--steps", "7", "--block-length", "64"], "--steps", "2 blocks"),
        (["--prompt", "x", "--block-length", "8", "--set", "block_size=4"], "block_size", "--block-length 8"),
        (["--prompt", "x", "--set", "confidence_threshold=0.9"], "confidence_threshold", "llada"),
        (["--prompt", "x", "--device", "nonsense"], "--device", "nonsense"),
        (["--prompt", "x", "--device", "cuda:99"], "--device", "cuda:99"),
        (["--prompt", "x", "--device-map", "[1]"], "--device-map", "[1]"),
        (["--prompt", "x", "--device-map", "auto", "--device", "cpu"], "--device", "--device-map"),
        (["--prompt", "x", "--tp-plan", "auto"], "--tp-plan", "--nproc-per-node N"),
        (["--prompt", "x", "--tp", "2"], "--tp", "--nproc-per-node 2"),
        (["--prompt", "x", "--tp", "0"], "--tp", "0"),
        (["--prompt", "x", "--tp", "2", "--device", "cpu"], "--device", "--tp"),
        (["--prompt", "x", "--dtype", "int8"], "--dtype", "int8"),
        (["--prompt", "x", "--family", "nonsense"], "--family", "nonsense"),
        (["--prompt", "x", "--revision", "main"], "--revision", "main"),
        (["--prompt", " ", "--chat"], "--prompt", "--chat"),
        (["--prompt", "x", "--like", "y"], "--like", "Megatron"),
        (["--prompt", "x", "--tokenizer", "/nowhere"], "/nowhere", "no such folder"),
    ],
)
def test_bad_words_are_one_line(cli: Cli, llada: Path, words: list[str], field: str, named: str) -> None:
    code, out, err = cli(llada, *words)
    assert code == 2, out
    assert err.startswith(f"dlm-bridge: {field}: " if field else "dlm-bridge: ")
    assert named in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "field", "named"),
    [
        (["--prompt", "x", "--steps", "4"], "--steps", "Qwen3ForCausalLM"),
        (["--prompt", "x", "--set", "nonsense=1"], "nonsense", "generate"),
        (["--prompt", ""], "--prompt", "--unconditional"),
        (["--unconditional"], "--prompt", "one token"),
        (["--unconditional", "--prompt", "x"], "--unconditional", "--prompt"),
        (["--unconditional", "--chat"], "--unconditional", "--chat"),
        (["--prompt", "x", "--gen-length", "500"], "--prompt", "128"),
        (["--prompt", "x", "--set", "do_sample=False", "--temperature", "0.7"], "do_sample", "--temperature 0.7"),
    ],
)
def test_what_an_autoregressive_model_refuses(cli: Cli, qwen3: Path, words: list[str], field: str, named: str) -> None:
    code, _, err = cli(qwen3, *words)
    assert code == 2
    assert err.startswith(f"dlm-bridge: {field}: ")
    assert named in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (['{"prompt": "a"}', '{"text": "b"}'], ":2"),
        (["", "{"], ":2"),
        (["[1]"], ":1"),
        (['{"prompt": 1}'], ":1"),
        (['{"messages": []}'], ":1"),
        ([""], ""),
    ],
)
def test_rows_without_a_prompt_are_named(cli: Cli, llada: Path, tmp_path: Path, lines: list[str], where: str) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    code, _, err = cli(llada, "--jsonl", tmp_path / "in.jsonl")
    assert code == 2
    assert err.startswith(f"dlm-bridge: {tmp_path / 'in.jsonl'}{where}: ")
    assert err.count("\n") == 1


def test_the_help_of_a_sampler(cli: Cli) -> None:
    code, out, _ = cli("--algorithm", "sdar", "--help")
    assert code == 0
    assert "Sampler sdar" in out
    assert "per block" in out
    assert "remasking_strategy=" in out
    code, _, err = cli("--algorithm", "nonsense", "--help")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("dlm-bridge: --algorithm: ")


def test_a_file_that_is_no_text(cli: Cli, llada: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\xff\xfe\x00")
    assert cli(llada, "--jsonl", tmp_path / "in.jsonl")[2].startswith(f"dlm-bridge: {tmp_path / 'in.jsonl'}: ")
    code, _, err = cli(llada, "--jsonl", "/dev/zero")
    assert (code, "/dev/zero: is a device" in err) == (2, True)


def test_a_pipe_that_no_one_writes_to_is_not_waited_for(cli: Cli, llada: Path, tmp_path: Path) -> None:
    """But one that the shell gives is read."""
    os.mkfifo(tmp_path / "in.jsonl")
    code, _, err = cli(llada, "--jsonl", tmp_path / "in.jsonl")
    assert (code, "in.jsonl: is a named pipe" in err) == (2, True)
    read, write = os.pipe()
    os.write(write, b'{"prompt": "x"}\n')
    os.close(write)
    code, out, err = cli(llada, "--jsonl", f"/dev/fd/{read}", "--gen-length", 4)
    os.close(read)
    assert code == 0, err
    assert json.loads(out)["prompt"] == "x"


def test_what_is_no_model(cli: Cli, llada: Path, tmp_path: Path) -> None:
    def said(place: Any) -> str:
        code, _, err = cli(place, "--prompt", "x")
        assert code == 2
        assert err.count("\n") == 1
        return err

    assert "/nowhere/at/all: no such folder, and not a Hub id" in said("/nowhere/at/all")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty}: " in said(empty)
    bert = tmp_path / "bert"
    bert.mkdir()
    write_tokenizer(bert, TOKENIZER)
    assert "it has no config.json" in said(bert)
    (bert / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert"}))
    assert "unknown architecture BertForMaskedLM" in said(bert)
    # A stock name beside remote code may stand for something else.
    (bert / "config.json").write_text(
        json.dumps({"architectures": ["GPT2LMHeadModel"], "auto_map": {"AutoModel": "modeling_x.X"}})
    )
    assert "GPT2LMHeadModel" in said(bert)
    (bert / "config.json").write_text(json.dumps({"architectures": ["LLaDAModelLM"], "model_type": "llada"}))
    assert "no weights there" in said(bert)


def test_texts_without_a_prompt(cli: Cli, llada: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    short = ("--gen-length", 4, "--steps", 1, "--block-length", 4)
    code, out, _ = cli(llada, "--jsonl", source, "--unconditional", *short)
    assert code == 0
    assert len(out.splitlines()) == 2
    code, out, _ = cli(llada, "--unconditional", *short)
    assert code == 0
