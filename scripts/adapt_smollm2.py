"""A published autoregressive model writes several tokens in a forward pass, and its text stays the same.

    git clone https://github.com/openai/grade-school-math
    python scripts/adapt_smollm2.py --data grade-school-math/grade_school_math/data --output adapted

SmolLM2-135M-Instruct comes from the Python package that ships it (see demo.py), GSM8K from OpenAI's repository. The
recipe is I-DLM's (arXiv 2604.11035): the model is fine-tuned as it is; then it learns to predict tokens behind mask
tokens, by an adapter that acts at masks only. What it predicts there is a draft, which the model itself checks in its
next forward pass. Stages, each of which needs those before it (`adapter` needs `prepare` only):

    prepare   the model, and GSM8K without the calculator's annotations; 500 training problems are set aside
    twin      fine-tuning on the solutions; learning rate and checkpoint are chosen on the problems set aside
    answers   the twin's own answers to the training problems, greedy and sampled, right or wrong: drafts imitate it
    drafts    the adapters, for N tokens in a forward pass (--recipes: or distilled drafts, or all weights)
    measure   all test problems: right answers, tokens a forward pass, and texts that differ from the twin's
    constrain the same under a regular expression: any text without #, then #### and a number
    code      HumanEval's prompts (--human-eval FILE): tokens a forward pass, and texts that differ from the twin's
    speed     tokens per second, against transformers' generate with a static cache
    adapter   the recipe on the untouched SmolLM2, with a small adapter, for any prompt
    draw      the picture of what is measured

Every figure is printed as a line of JSON once it is known, and stands in --output/results. What is in --output is not
done again, and what was cut off goes on: `--seconds` limits one call. Every token before the end of a text counts, and
every forward pass of its row, with the one over the prompt. Trainings run on all visible GPUs (CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from gsm8k import CALCULATOR, last_number, ratio_interval, stated_number, wilson

STAGES = ("prepare", "twin", "answers", "drafts", "measure", "constrain", "code", "speed", "adapter", "draw")
# A special token that no chat contains: the vocabulary does not grow, so that its size stays a multiple of 64.
MASK = "<empty_output>"
STOPPED = 75  # exit code of a training that is cut off
START_UP = 60.0  # seconds that a command needs beside its training
RANK, ADAPTER_RANK, ADAPTER_BYTES = 128, 12, 8_000_000
ADAPTER_BLOCK = 4
STATED = r"[^#]*#### -?[0-9]+"  # a text of GSM8K's form


@dataclass(frozen=True)
class Recipe:
    """How drafts are trained: a command of dlm-bridge with its options. `same_text`: the text stays the twin's."""

    label: str
    command: str
    options: dict[str, Any]
    same_text: bool = True


ON_MASKS = {"lora-rank": RANK, "lora-mask-only": True}
RECIPES = {
    "drafts": Recipe("drafts", "sft", ON_MASKS),
    "distilled": Recipe("distilled drafts", "distill", ON_MASKS),
    "whole": Recipe("all weights", "sft", {"auto-balance": True}, same_text=False),
}


@dataclass(frozen=True)
class Preset:
    """Sizes for a machine."""

    epochs: int = 10
    rates: tuple[float, ...] = (1e-4, 3e-4, 6e-4)  # of the twin
    rows: int = 32  # packed rows of a step of the twin
    draft_rows: int = 48  # of a step of the drafts
    draft_batch: int = 24  # of a forward pass: 22 GB
    draft_length: int = 640  # tokens of their rows: the longest question, and its answer
    length: int = 512  # tokens of a packed row
    dev: int = 500  # training problems set aside
    train: int | None = None  # training problems; None: all others
    test: int | None = None
    samples: int = 2  # sampled answers to a training problem
    draft_steps: int = 800
    adapter_steps: int = 600
    draft_lr: float = 5e-4
    whole_lr: float = 3e-4  # of all weights
    recipes: tuple[str, ...] = ("drafts",)
    adapter_lr: float = 1e-3
    own_prompts: int = 6000  # prompts that the model is to write itself
    held_out: int = 200  # of them, and of the problems set aside, for the adapter
    new_tokens: int = 256
    batch: int = 1024  # rows that are sampled together
    test_batch: int = 256
    precision: str = "bf16"
    blocks: tuple[int, ...] = (8, 4)
    fewer: tuple[int, ...] = (4,)  # tokens of a pass for which the first drafts are measured too
    speeds: tuple[int, ...] = (1, 16, 128)
    singles: int = 8  # prompts, one after the other, for the speed of one
    device: str | None = None


PRESETS = {
    "gpu": Preset(),
    "quick": Preset(epochs=5, rates=(3e-4,), test=256, samples=1, draft_steps=300, adapter_steps=300, blocks=(8,)),
    "cpu": Preset(
        epochs=2,
        rates=(1e-3,),
        rows=4,
        draft_rows=4,
        draft_batch=4,
        draft_length=160,
        fewer=(3,),
        length=128,
        dev=3,
        train=12,
        test=4,
        samples=1,
        draft_steps=4,
        adapter_steps=4,
        own_prompts=12,
        held_out=3,
        new_tokens=12,
        batch=8,
        test_batch=4,
        precision="fp32",
        speeds=(1, 2),
        singles=1,
        device="cpu",
    ),
}


class OutOfTimeError(Exception):
    """The call's time is used up."""


@dataclass
class Work:
    """What all stages need."""

    root: Path
    data: Path
    preset: Preset
    given: Path | None  # the published model's folder
    deadline: float
    human_eval: Path | None = None

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def base(self) -> Path:
        return self.root / "smollm2"

    @property
    def twin(self) -> Path:
        return self.root / "twin"

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def need(self, seconds: float) -> None:
        if self.left() < seconds:
            raise OutOfTimeError

    def kept(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What results/`name`.json holds; computed, written and printed where it is not there yet."""
        file = self.results / f"{name}.json"
        if not file.exists():
            self.need(1)
            began = time.monotonic()
            result = {"name": name, **compute(), "took_s": round(time.monotonic() - began, 1)}
            write_json(file, result)
            say(result)
        return dict(json.loads(file.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct; fetched by default")
    parser.add_argument("--output", type=Path, default=Path("adapted"), help="(default: %(default)s)")
    parser.add_argument("--stages", default=",".join(STAGES), help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time of this call; the next one goes on")
    parser.add_argument("--preset", choices=("gpu", "cpu"), default="gpu", help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="about ten minutes of a GPU")
    parser.add_argument("--blocks", help="N of the drafts, such as 4,8: tokens of a forward pass at most")
    parser.add_argument("--rates", help="learning rates of the twin, such as 1e-4,3e-4")
    parser.add_argument("--recipes", default="drafts", help=f"of {', '.join(RECIPES)} (default: %(default)s)")
    parser.add_argument("--human-eval", type=Path, help="HumanEval.jsonl of the package human-eval")
    for name in ("draft-steps", "adapter-steps", "draft-batch", "batch"):
        parser.add_argument(f"--{name}", type=int, help="the preset's by default")
    for name in ("draft-lr", "whole-lr", "adapter-lr"):
        parser.add_argument(f"--{name}", type=float, help="the preset's by default")
    given = parser.parse_args()
    stages = given.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    changes = {
        name: value
        for name in ("draft_steps", "adapter_steps", "draft_batch", "batch", "draft_lr", "whole_lr", "adapter_lr")
        if (value := getattr(given, name)) is not None
    }
    changes["recipes"] = tuple(given.recipes.split(","))
    if unknown := set(changes["recipes"]) - set(RECIPES):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    if given.blocks:
        changes["blocks"] = tuple(map(int, given.blocks.split(",")))
    if given.rates:
        changes["rates"] = tuple(map(float, given.rates.split(",")))
    preset = dataclasses.replace(PRESETS["quick" if given.quick else given.preset], **changes)
    root = given.output.absolute()
    (root / "results").mkdir(parents=True, exist_ok=True)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.setdefault(name, str(root / "compiled" / name.split("_", maxsplit=1)[0].lower()))
    work = Work(root, given.data, preset, given.model, time.monotonic() + given.seconds, given.human_eval)
    try:
        for stage in (one for one in STAGES if one in stages):
            began = time.monotonic()
            globals()[f"stage_{stage}"](work)
            say({"stage": stage, "seconds": round(time.monotonic() - began, 1)})
    except OutOfTimeError:
        say({"stopped": "the time of this call is over: the same command goes on"})
    return 0


def say(facts: dict[str, Any]) -> None:
    """Print a line of JSON, without long lists."""
    short = {name: value for name, value in facts.items() if not (isinstance(value, list) and len(value) > 20)}
    print(json.dumps(short), flush=True)


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".partial")
    unfinished.write_text(json.dumps(value) + "\n", encoding="utf-8")
    unfinished.replace(file)


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ---- Stages.


def stage_prepare(work: Work) -> None:
    """The published model in bf16, and conversations: rows/train.jsonl, dev.jsonl, test.jsonl."""
    if not (work.base / "tokenizer.json").exists():
        if work.given is not None:
            shutil.copytree(work.given, work.base)
        else:
            from demo import fetch_published_model
            from rich.console import Console

            if not fetch_published_model(Console(), work.base):
                raise SystemExit("the published model could not be fetched")

    def compute() -> dict[str, Any]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(work.base)
        preset, found = work.preset, {}
        for split in ("train", "test"):
            found[split] = []
            for problem in read_rows(work.data / f"{split}.jsonl"):
                answer = CALCULATOR.sub("", problem["answer"])
                said = (("user", problem["question"]), ("assistant", answer))
                messages = [{"role": role, "content": text} for role, text in said]
                size = len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
                if split == "test" or size <= preset.length:
                    found[split].append({"messages": messages})
        random.Random(0).shuffle(found["train"])
        found["dev"], found["train"] = found["train"][: preset.dev], found["train"][preset.dev :][: preset.train]
        found["test"] = found["test"][: preset.test]
        for split, rows in found.items():
            write_rows(work.root / "rows" / f"{split}.jsonl", rows)
        return {"preset": dataclasses.asdict(preset), **{split: len(rows) for split, rows in found.items()}}

    work.kept("rows", compute)


def stage_twin(work: Work) -> None:
    """The autoregressive twin: bf16 weights in `twin`, those that answer most of the problems set aside."""
    preset, candidates = work.preset, []
    for rate in preset.rates:
        name = f"twin-{rate:g}"
        options = {"epochs": preset.epochs, "lr": rate, "global-batch-size": preset.rows, "keep-last": 0}
        train(work, name, work.base, work.root / "rows" / "train.jsonl", options, saves=2)
        for checkpoint in sorted((work.root / name / "checkpoints").glob("step-*")):
            measured = work.kept(f"{name}-{checkpoint.name}", lambda c=checkpoint: dev_accuracy(work, c))
            candidates.append((measured["right"], name, checkpoint))

    def choose() -> dict[str, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        best = max(candidates, key=lambda one: one[0])
        model = AutoModelForCausalLM.from_pretrained(best[2], dtype="bfloat16")
        model.save_pretrained(work.twin)
        AutoTokenizer.from_pretrained(work.base).save_pretrained(work.twin)
        return {"run": best[1], "checkpoint": best[2].name, "dev_right": best[0], "of": preset.dev}

    work.kept("twin", choose)


def dev_accuracy(work: Work, checkpoint: Path) -> dict[str, Any]:
    """Right answers of a checkpoint to the problems set aside."""
    rows, folder = conversations(work, "dev"), work.root / "candidate"
    convert(checkpoint, folder, 1, dtype=work.preset.precision)
    file = work.root / "candidates" / f"{checkpoint.parents[1].name}-{checkpoint.name}.jsonl"
    found = sample(work, folder, prompts_of(work, rows), file, work.preset.precision, work.preset.test_batch)
    texts = decode(work, found)
    return {"right": sum(is_right(text, row) for text, row in zip(texts, rows, strict=True)), "of": len(rows)}


def stage_answers(work: Work) -> None:
    """answers.jsonl: the twin's own texts for all training problems, as tokens."""
    preset, folder = work.preset, converted(work.twin, work.root / "twin-idlm", 1)

    def compute() -> dict[str, Any]:
        prompts = prompts_of(work, conversations(work, "train"))
        greedy = sample(work, folder, prompts, work.root / "greedy.jsonl", preset.precision, preset.batch)
        drawn = sample(
            work,
            folder,
            prompts * preset.samples,
            work.root / "drawn.jsonl",
            preset.precision,
            preset.batch,
            temperature=0.7,
            top_k=None,
            top_p=None,
        )
        counts = write_recorded(
            work.root / "answers.jsonl", prompts * (1 + preset.samples), [*greedy, *drawn], preset.draft_length
        )
        return {"greedy": len(greedy), "sampled": len(drawn), **counts}

    work.kept("answers", compute)


def stage_drafts(work: Work) -> None:
    """RECIPE-N: adapters at masks only, or all weights, of the twin in the form of N - 1 masks after a token."""
    preset = work.preset
    for recipe in preset.recipes:
        for block in preset.blocks:
            base = converted(work.twin, work.root / f"twin-idlm-{block}", block - 1)
            rate = preset.draft_lr if RECIPES[recipe].same_text else preset.whole_lr
            options = {**draft_options(preset, rate, preset.draft_steps), **RECIPES[recipe].options}
            name, data = f"{recipe}-{block}", work.root / "answers.jsonl"
            train(work, name, base, data, options, saves=4, program=RECIPES[recipe].command)


def stage_measure(work: Work) -> None:
    """results/measured-*.json: all test problems."""
    preset, rows = work.preset, conversations(work, "test")
    precisions = ("bf16", "fp32") if preset.precision == "bf16" else ("fp32",)
    first, most = precisions[0], preset.blocks[0]
    work.kept("measured-twin", lambda: correctness(work, rows, twin_texts(work, first)))
    for recipe in preset.recipes:
        # Drafts for N tokens a pass are also drafts for fewer. With an adapter at masks, N does not change the text.
        ways = [(first, block, block, tails) for block in preset.blocks for tails in (True, False)]
        ways += [(first, most, fewer, True) for fewer in preset.fewer if fewer < most]
        if RECIPES[recipe].same_text and len(precisions) > 1:
            ways += [("fp32", block, block, True) for block in preset.blocks]
        for precision, block, size, tails in ways:
            name = f"{recipe}-{block}-n{size}-{'tails' if tails else 'strided'}-{precision}"
            work.kept(f"measured-{name}", partial(measure, work, name, recipe, block, size, tails, precision))


def twin_texts(work: Work, precision: str) -> list[dict[str, Any]]:
    """Greedy answers of the twin to the test problems, by transformers' `generate`."""
    prompts = prompts_of(work, conversations(work, "test"))
    file = work.root / "texts" / f"twin-{precision}.jsonl"
    return sample(work, work.twin, prompts, file, precision, work.preset.test_batch)


def measure(work: Work, name: str, recipe: str, block: int, size: int, tails: bool, precision: str) -> dict[str, Any]:
    """Figures of the drafts for `block` tokens a pass, used for `size`."""
    rows, settings = conversations(work, "test"), {"mask_tails": tails, "block_length": size}
    prompts, drafts, file = prompts_of(work, rows), newest(work, f"{recipe}-{block}"), work.root / "texts" / name
    found = sample(work, drafts, prompts, file.with_suffix(".jsonl"), precision, work.preset.test_batch, **settings)
    own = twin_texts(work, precision)
    facts = {"most": size, "tails": tails, "precision": precision, **correctness(work, rows, found, own)}
    return facts | (compare(work, work.twin, prompts, own, found, precision) if RECIPES[recipe].same_text else {})


def stage_constrain(work: Work) -> None:
    """results/constrained-*.json: the test problems as `measured-*-tails`, each text one of STATED."""
    rows, block = conversations(work, "test"), work.preset.blocks[0]
    prompts, precision = prompts_of(work, rows), work.preset.precision
    settings = {"mask_tails": True, "block_length": block}
    for recipe in work.preset.recipes:
        name = f"{recipe}-{block}-n{block}-tails-{precision}"

        def constrained(recipe: str = recipe, name: str = name) -> dict[str, Any]:
            drafts, file = newest(work, f"{recipe}-{block}"), work.root / "texts" / f"constrained-{name}.jsonl"
            asked = partial(sample, work, drafts, prompts, precision=precision, batch=work.preset.test_batch)
            found = asked(file=file, pattern=STATED, **settings)
            free = asked(file=work.root / "texts" / f"{name}.jsonl", **settings)
            texts = decode(work, found)
            valid = sum(re.fullmatch(STATED, text) is not None for text in texts)
            facts = {"pattern": STATED, "valid": valid, **correctness(work, rows, found, free)}
            rates = [tokens_per_forward(rows) for rows in (found, free)]
            right = sum(is_right(text, row) for text, row in zip(decode(work, free), rows, strict=True))
            return {**facts, "free_right": right, "free_tokens_per_forward": rates[1], "rate": rates[0] / rates[1]}

        work.kept(f"constrained-{name}", constrained)


def stage_code(work: Work) -> None:
    """results/code-*.json: greedy texts to HumanEval's prompts. Nothing is executed."""
    if work.human_eval is None:
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.base)
    asked = "Complete the following Python function.\n\n{}"
    prompts = [chat(tokenizer, asked.format(row["prompt"])) for row in read_rows(work.human_eval)]
    precision = "fp32"  # in bf16, near ties change the text
    own = sample(work, work.twin, prompts, work.root / "texts" / "code-twin.jsonl", precision, work.preset.test_batch)
    for recipe in (one for one in work.preset.recipes if RECIPES[one].same_text):
        for block in work.preset.blocks:
            name = f"code-{recipe}-{block}"

            def compute(recipe: str = recipe, block: int = block, name: str = name) -> dict[str, Any]:
                file, settings = work.root / "texts" / f"{name}.jsonl", {"mask_tails": True, "block_length": block}
                drafts = newest(work, f"{recipe}-{block}")
                found = sample(work, drafts, prompts, file, precision, work.preset.test_batch, **settings)
                rate = {"tokens_per_forward": tokens_per_forward(found), "interval": rate_interval(found)}
                return {**rate, **compare(work, work.twin, prompts, own, found, precision), "machine": machine()}

            work.kept(name, compute)


def stage_speed(work: Work) -> None:
    """results/speed-*.json: tokens per second of the same prompts, medians of three after a warm-up."""
    preset, prompts = work.preset, prompts_of(work, conversations(work, "test"))
    ways: list[tuple[str, Path, dict[str, Any]]] = [
        (
            f"{recipe}-{block}-{'tails' if tails else 'strided'}",
            newest(work, f"{recipe}-{block}"),
            {"mask_tails": tails},
        )
        for recipe in preset.recipes
        for block in preset.blocks
        for tails in (True, False)
    ]
    ways += [
        (
            f"{recipe}-{block}-n{size}-tails",
            newest(work, f"{recipe}-{block}"),
            {"mask_tails": True, "block_length": size},
        )
        for recipe in preset.recipes
        for block in preset.blocks[:1]
        for size in preset.fewer[:1]
        if size < block
    ]
    ways.append(("twin-engine", converted(work.twin, work.root / "twin-idlm", 1), {"block_length": 2}))
    if preset.precision == "bf16":  # a GPU
        ways += [(f"{name}-compiled", place, {**own, "execution": "compiled"}) for name, place, own in ways[:1]]
    singles = [[prompt] for prompt in prompts[: preset.singles]]
    asked = {count: [prompts[:count]] if count > 1 else singles for count in preset.speeds}
    for count, batches in asked.items():
        for name, place, own in ways:
            work.kept(f"speed-{count}-{name}", lambda b=batches, p=place, o=own: engine_speed(work, p, b, o))
        work.kept(f"speed-{count}-transformers-static", lambda b=batches: transformers_speed(work, b))
    for count, batches in asked.items():  # last, because its engine keeps its memory
        work.kept(f"speed-{count}-vllm", lambda b=batches: vllm_speed(work, b))


def stage_adapter(work: Work) -> None:
    """results/adapter: drafts of the published model itself, small enough to travel with a package."""
    preset, base = work.preset, converted(work.base, work.root / "smollm2-idlm", ADAPTER_BLOCK - 1)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.base)

    def write_prompts() -> dict[str, Any]:
        """Prompts by the model itself: what it writes as the user."""
        opened = tokenizer.apply_chat_template(
            [{"role": "user", "content": "\x00"}], tokenize=False, add_generation_prompt=False
        ).partition("\x00")[0]
        start = tokenizer(opened, add_special_tokens=False)["input_ids"]
        draws = {"temperature": 1.0, "top_k": None, "top_p": None, "block_length": 2, "gen_length": 64}
        file = work.root / "adapter" / "turns.jsonl"
        found = sample(work, base, [start] * preset.own_prompts, file, preset.precision, preset.batch, **draws)
        ended = [row["tokens"][:-1] for row in found if row["reason"] == "stop"]
        texts = [tokenizer.decode(tokens).strip() for tokens in ended if 5 <= len(tokens) <= 60]
        texts = list(dict.fromkeys(text for text in texts if text)) or ["What is the capital of France?"]
        random.Random(0).shuffle(texts)
        asked = [row[0]["content"] for row in conversations(work, "dev")[: preset.held_out]]
        own = texts[: min(preset.held_out, len(texts) // 4 + 1)]
        held = [{"kind": "own", "text": text} for text in own] + [{"kind": "gsm8k", "text": text} for text in asked]
        rest = texts[len(own) :] or texts
        trained = [*rest, *(row[0]["content"] for row in conversations(work, "train"))]
        write_rows(work.root / "adapter" / "held-out.jsonl", held)
        write_rows(work.root / "adapter" / "prompts.jsonl", [{"text": text} for text in trained])
        return {"written": len(found), "kept": len(texts), "held_out": len(held), "training": len(trained)}

    work.kept("adapter-prompts", write_prompts)

    def encoded(name: str) -> list[list[int]]:
        return [chat(tokenizer, row["text"]) for row in read_rows(work.root / "adapter" / f"{name}.jsonl")]

    def answer() -> dict[str, Any]:
        prompts = encoded("prompts")
        file = work.root / "adapter" / "texts.jsonl"
        found = sample(work, base, prompts, file, preset.precision, preset.batch, block_length=2)
        return write_recorded(work.root / "adapter" / "answers.jsonl", prompts, found, preset.draft_length)

    work.kept("adapter-answers", answer)
    options = {**draft_options(preset, preset.adapter_lr, preset.adapter_steps), **ON_MASKS, "lora-rank": ADAPTER_RANK}
    train(work, "adapter-run", base, work.root / "adapter" / "answers.jsonl", options, saves=4)
    folder = work.results / "adapter"
    work.kept("adapter-file", lambda: pack_adapter(newest(work, "adapter-run"), folder, base))
    held = read_rows(work.root / "adapter" / "held-out.jsonl")
    for precision in ("bf16", "fp32") if preset.precision == "bf16" else ("fp32",):

        def measure(precision: str = precision) -> dict[str, Any]:
            prompts, texts = encoded("held-out"), work.root / "adapter"
            size = preset.test_batch
            own = sample(work, work.base, prompts, texts / f"held-base-{precision}.jsonl", precision, size)
            facts: dict[str, Any] = {}
            for tails in (True, False):
                name = "tails" if tails else "strided"
                file = texts / f"held-{name}-{precision}.jsonl"
                found = sample(work, folder, prompts, file, precision, size, mask_tails=tails, block_length=None)
                facts[name] = compare(work, work.base, prompts, own, found, precision)
                for kind in ("own", "gsm8k"):
                    some = [row for row, about in zip(found, held, strict=True) if about["kind"] == kind]
                    rate = {"tokens_per_forward": tokens_per_forward(some), "interval": rate_interval(some)}
                    facts[f"{name}_{kind}"] = rate
            return {**facts, "machine": machine()}

        work.kept(f"adapter-measured-{precision}", measure)


def stage_draw(work: Work) -> None:
    """results/adaptation.png: right answers against tokens a forward pass."""
    draw(work.results, work.results / "adaptation.png")


# ---- Training.


def draft_options(preset: Preset, rate: float, steps: int) -> dict[str, Any]:
    return {
        "seq-length": preset.draft_length,
        "objective": "idlm",
        "steps": steps,
        "lr": rate,
        "global-batch-size": preset.draft_rows,
        "micro-batch-size": preset.draft_batch,
        "keep-last": 1,
    }


def train(
    work: Work, name: str, model: Path, data: Path, options: dict[str, Any], saves: int, program: str = "sft"
) -> None:
    """`dlm-bridge sft`, or what is left of it. If it fails before its first step, it runs without torch.compile."""
    run, preset = work.root / name, work.preset
    if (work.results / f"{name}.json").exists():
        return
    length = options.get("seq-length", preset.length)
    steps = options.get("steps") or math.ceil(packed_rows(work, data, length) / preset.rows) * options.pop("epochs")
    options = {"seq-length": length, **options, "steps": steps}
    options |= {"warmup-steps": max(1, steps // 20), "save-interval": max(1, math.ceil(steps / saves))}
    options |= {"lr-schedule": "cosine", "min-lr": 0, "weight-decay": 0, "beta2": 0.999, "precision": preset.precision}
    options |= {"split": "1,0,0", "packing": True, "stopped-exit-code": STOPPED, "quiet": True}
    if gpus() > 1:
        own = options["global-batch-size"] // gpus()
        most = min(own, options.get("micro-batch-size", own))
        micro = max(rows for rows in range(1, most + 1) if own % rows == 0)
        options |= {"nproc-per-node": gpus(), "micro-batch-size": micro}
    began, eager = time.monotonic(), work.root / f"{name}.eager"
    for attempt in range(2):
        work.need(START_UP + 15)
        resumed = any((run / "checkpoints").glob("step-*"))
        if run.exists() and not resumed:
            shutil.rmtree(run)
        words = ["--model", model, "--data", data, "--output", run, *(["--resume"] if resumed else [])]
        words += ["--exit-duration", f"{(work.left() - START_UP) / 60:.2f}"] if math.isfinite(work.left()) else []
        words += ["--no-compile"] if eager.exists() else []
        for option, value in options.items():
            words += [f"--{option}"] if value is True else [f"--{option}", value]
        say({"command": " ".join(map(str, ["dlm-bridge", program, *words]))})
        release_model()
        before = len(metrics(run))
        done = subprocess.run(command(program, *words), check=False)
        if done.returncode == STOPPED:
            raise OutOfTimeError
        if done.returncode == 0:
            break
        if attempt or eager.exists() or len(metrics(run)) > before:
            raise SystemExit(f"the training {name} failed ({done.returncode})")
        eager.touch()
        say({"again": name, "because": "it failed before its first step", "change": "without torch.compile"})
    curve = [(row["step"], row["loss"]) for row in metrics(run) if "loss" in row]
    speeds = [row["tokens_per_s"] for row in metrics(run) if row.get("tokens_per_s")]
    work.kept(
        name,
        lambda: {
            "steps": steps,
            "options": {key: str(value) for key, value in options.items()},
            "compiled": not eager.exists(),
            "training_s": round(time.monotonic() - began, 1),
            "tokens_per_s": statistics.median(speeds) if speeds else None,
            "first_loss": curve[0][1],
            "last_loss": statistics.mean(loss for _, loss in curve[-20:]),
            "curve": curve[:: max(1, len(curve) // 100)],
        },
    )


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def metrics(run: Path) -> list[dict[str, Any]]:
    return read_rows(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []


def packed_rows(work: Work, data: Path, length: int) -> int:
    """About the number of rows of `length` tokens that the conversations fill."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.base)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in read_rows(data)]
    return max(1, sum(map(len, tokenizer(texts)["input_ids"])) // length)


def newest(work: Work, name: str) -> Path:
    """The last checkpoint of a run."""
    return max((work.root / name / "checkpoints").glob("step-*"))


def command(*words: str | Path | float) -> list[str]:
    return [sys.executable, "-m", "dlm_bridge.cli", *map(str, words)]


def convert(source: Path, folder: Path, masks: int, dtype: str = "keep") -> None:
    """`convert-to-dlm --to idlm --block-size masks`."""
    from dlm_bridge.convert.to_dlm import convert_to_dlm

    convert_to_dlm(source, folder, mask_token=MASK, to="idlm", block_size=masks, dtype=dtype, overwrite=True)


def converted(source: Path, folder: Path, masks: int) -> Path:
    """The folder of `convert`, written once."""
    if not (folder / "config.json").exists():
        convert(source, folder, masks)
    return folder


def pack_adapter(checkpoint: Path, folder: Path, base: Path) -> dict[str, Any]:
    """Write the adapter in bf16."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(checkpoint / "adapter_model.safetensors")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(halves, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    for name in ("adapter_config.json", "base.json"):
        shutil.copy(checkpoint / name, folder / name)
    size = (folder / "adapter_model.safetensors").stat().st_size
    return {"bytes": size, "fits": size <= ADAPTER_BYTES, "base": str(base), "mask_token": MASK}


# ---- Sampling.

_loaded: dict[str, Any] = {}  # the last model that was sampled from


def load(work: Work, folder: Path, precision: str) -> Any:
    from dlm_bridge.loading import Placement, load_model

    key = f"{folder} {precision}"
    if key not in _loaded:
        release_model()
        _loaded[key] = load_model(folder, Placement(device=work.preset.device), dtype=precision)
    return _loaded[key]


def release_model() -> None:
    """Free the memory of the last model, for a training or another model."""
    for loaded in _loaded.values():
        from dlm_bridge.generation.runtime.runner import release

        release(loaded.model)
    _loaded.clear()
    gc.collect()
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def sample(
    work: Work,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    file: Path,
    precision: str,
    batch: int,
    pattern: str | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Texts for the prompts, greedy unless the settings say otherwise: tokens, reason of the end, forward passes.
    Each is one of the regular expression `pattern`, if it is given.

    Rows go to `file` as they end; those that it has are not sampled again."""
    from dlm_bridge.generation.offline import PromptSampler
    from dlm_bridge.generation.request import Failed

    done = {row["row"]: row for row in read_rows(file)} if file.exists() else {}
    if len(done) < len(prompts):
        work.need(20)
        loaded = load(work, folder, precision)
        own = {"temperature": 0.0, "gen_length": work.preset.new_tokens, **settings}
        if loaded.diffusion:
            own.setdefault("block_length", 2)
            own = {"seed": 0, **own}
            if own["block_length"] is None:  # the model's
                del own["block_length"]
        began, before = time.monotonic(), len(done)
        bound: list[Any] = []
        if pattern is not None:
            from dlm_bridge.generation.offline import compile_constraint
            from dlm_bridge.structured.constraint import Constraint

            arguments = ("", prompts[0], own)
            one = compile_constraint(loaded.model, loaded.tokenizer, Constraint.regex(pattern), *arguments)
            bound = [one] * len(prompts)
        sampler = PromptSampler(loaded.model, loaded.tokenizer, prompts, own, batch, skip=set(done), constraints=bound)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            for event in sampler:
                if isinstance(event, Failed):
                    raise event.error
                facts = (event.name, list(event.tokens), event.finish_reason, event.forwards)
                done[event.name] = dict(zip(("row", "tokens", "reason", "forwards"), facts, strict=True))
                lines.write(json.dumps(done[event.name]) + "\n")
                if work.left() < 5 and len(done) < len(prompts):
                    raise OutOfTimeError
        new = [row for number, row in enumerate(done.values()) if number >= before]
        seconds = time.monotonic() - began
        tokens = sum(len(row["tokens"]) for row in new)
        say(
            {
                "sampled": file.name,
                "rows": len(new),
                "seconds": round(seconds, 1),
                "tokens_per_s": round(tokens / seconds),
            }
        )
    return [done[number] for number in range(len(prompts))]


def chat(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    tokens = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    return list(tokens)


def conversations(work: Work, split: str) -> list[list[dict[str, str]]]:
    return [row["messages"] for row in read_rows(work.root / "rows" / f"{split}.jsonl")]


def prompts_of(work: Work, rows: Sequence[list[dict[str, str]]]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.base)
    return [chat(tokenizer, row[0]["content"]) for row in rows]


def decode(work: Work, found: Sequence[dict[str, Any]]) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.base)
    return [tokenizer.decode(row["tokens"], skip_special_tokens=True) for row in found]


def write_recorded(
    file: Path, prompts: Sequence[Sequence[int]], found: Sequence[dict[str, Any]], longest: int
) -> dict[str, int]:
    """Write sampled answers as rows of at most `longest` tokens that `sft` reads, each different one of a prompt
    once."""
    rows, seen = [], set()
    for prompt, row in zip(prompts, found, strict=True):
        key = (tuple(prompt), tuple(row["tokens"]))
        if key not in seen and row["tokens"] and len(prompt) + len(row["tokens"]) <= longest:
            seen.add(key)
            steps = [0] * len(row["tokens"])
            rows.append({"prompt_token_ids": list(prompt), "token_ids": row["tokens"], "commit_steps": steps})
    random.Random(1).shuffle(rows)
    write_rows(file, rows)
    return {"rows": len(rows), "tokens": sum(len(row["token_ids"]) for row in rows)}


# ---- Measures.


def is_right(text: str, row: Sequence[dict[str, str]], read: Callable[[str], float | None] = stated_number) -> bool:
    found = read(text)
    return found is not None and found == stated_number(row[1]["content"])


def tokens_per_forward(found: Sequence[dict[str, Any]]) -> float:
    """Tokens before the end of the text per forward pass of their row."""
    tokens = sum(len(row["tokens"]) - (row["reason"] == "stop") for row in found)
    return round(tokens / max(1, sum(row["forwards"] for row in found)), 4)


def correctness(
    work: Work,
    rows: Sequence[list[dict[str, str]]],
    found: Sequence[dict[str, Any]],
    twins: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Right answers with intervals, tokens a forward pass, and the ratio to the twin's accuracy."""
    texts = decode(work, found)
    strict = [is_right(text, row) for text, row in zip(texts, rows, strict=True)]
    flexible = [is_right(text, row, last_number) for text, row in zip(texts, rows, strict=True)]
    facts: dict[str, Any] = {
        "problems": len(rows),
        "right": sum(strict),
        "interval": wilson(sum(strict), len(rows)),
        "flexible": sum(flexible),
        "ended": sum(row["reason"] == "stop" for row in found),
        "tokens_per_forward": 1.0 if twins is None else tokens_per_forward(found),
        "tokens_per_forward_interval": None if twins is None else rate_interval(found),
        "machine": machine(),
    }
    if twins is not None:
        own = [is_right(text, row) for text, row in zip(decode(work, twins), rows, strict=True)]
        ratio = ratio_interval(strict, own)
        facts |= {"ratio": ratio and ratio[0], "ratio_interval": ratio and ratio[1:]}
    return facts


def rate_interval(found: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """95% interval of the tokens a forward pass, by a bootstrap over problems."""
    import numpy as np

    counts = np.array([[len(row["tokens"]) - (row["reason"] == "stop"), row["forwards"]] for row in found], float)
    picks = np.random.default_rng(0).integers(len(found), size=(1000, len(found)))
    sums = counts[picks].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    return round(float(low), 4), round(float(high), 4)


def compare(
    work: Work,
    model: Path,
    prompts: Sequence[list[int]],
    expected: Sequence[dict[str, Any]],
    found: Sequence[dict[str, Any]],
    precision: str,
) -> dict[str, Any]:
    """Number of equal texts and, for each other, the difference of the two tokens' logits where it begins, by the
    autoregressive model in the same precision."""
    import torch

    pairs = [(n, a["tokens"], b["tokens"]) for n, (a, b) in enumerate(zip(expected, found, strict=True))]
    different = [(n, a, b) for n, a, b in pairs if a != b]
    gaps = []
    loaded = load(work, model, precision) if different else None
    for n, a, b in different:
        common = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if common == min(len(a), len(b)):
            gaps.append({"row": n, "at": common, "gap": None})
            continue
        tokens = torch.tensor([[*prompts[n], *a[:common]]], device=loaded.model.device)
        with torch.no_grad():
            logits = loaded.model(input_ids=tokens).logits[0, -1].float()
        top = logits.max().item()
        gap = {"row": n, "at": common, "gap": round((logits[a[common]] - logits[b[common]]).item(), 5)}
        gaps.append({**gap, "below_best": round(top - min(logits[a[common]], logits[b[common]]).item(), 5)})
    known = sorted(abs(one["gap"]) for one in gaps if one["gap"] is not None)
    return {
        "precision": precision,
        "identical": len(pairs) - len(different),
        "of": len(pairs),
        "largest_gap": known[-1] if known else None,
        "median_gap": statistics.median(known) if known else None,
        "differences": gaps,
    }


def machine() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"


# ---- Speed.


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - began)


def speed(work: Work, batches: Sequence[Sequence[list[int]]], write: Callable[[Any, Any], int]) -> dict[str, Any]:
    """Median of three after a warm-up. `write` returns the number of new tokens of a padded batch."""
    import torch

    padded, width = [], max(len(row) for batch in batches for row in batch)  # one shape: nothing is compiled twice
    for batch in batches:
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        padded.append((tokens, real))
    seconds: list[float] = []
    for run in range(4):
        spent: list[float] = []
        with timed(spent):
            tokens = sum(write(*one) for one in padded)
        if run:
            seconds += spent
        work.need(spent[0] + 2)
    median = statistics.median(seconds)
    return {"batch": len(batches[0]), "tokens": tokens, "seconds": seconds, "tokens_per_s": round(tokens / median, 1)}


def engine_speed(work: Work, folder: Path, batches: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """`generate` of this package: CUDA graphs on a GPU."""
    loaded = load(work, folder, work.preset.precision)
    model, rates = loaded.model, []
    settings = {"temperature": 0.0, "gen_length": work.preset.new_tokens, **settings}

    def write(tokens: Any, real: Any) -> int:
        tokens, real = tokens.to(model.device), real.to(model.device)
        output = model.generate(tokens, attention_mask=real, return_dict_in_generate=True, **settings)
        rates.append(output.tokens_per_forward)
        return int((output.row_ends - tokens.shape[1]).sum())

    return {**speed(work, batches, write), "tokens_per_forward": rates[-1], "machine": machine()}


def transformers_speed(work: Work, batches: Any) -> dict[str, Any]:
    """transformers' `generate` of the twin with a static cache, which it compiles on a GPU."""
    loaded = load(work, work.twin, work.preset.precision)
    model, end = loaded.model, loaded.tokenizer.eos_token_id

    def write(tokens: Any, real: Any) -> int:
        tokens, real = tokens.to(model.device), real.to(model.device)
        output = model.generate(
            tokens,
            attention_mask=real,
            do_sample=False,
            max_new_tokens=work.preset.new_tokens,
            cache_implementation="static",
            pad_token_id=end,
        )
        new = output[:, tokens.shape[1] :].tolist()
        return sum(row.index(end) + 1 if end in row else len(row) for row in new)

    work.need(90 if work.preset.precision == "bf16" else 1)
    return {**speed(work, batches, write), "machine": machine()}


def vllm_speed(work: Work, batches: Any) -> dict[str, Any]:
    """vLLM's greedy text of the twin, where it is installed."""
    try:
        import vllm
        from vllm import SamplingParams
    except ImportError as error:
        return {"absent": f"vllm cannot be imported: {error}"}
    release_model()
    engine = vllm_engine(work.twin, max(work.preset.speeds))
    greedy = SamplingParams(temperature=0.0, max_tokens=work.preset.new_tokens)

    def write(tokens: Any, real: Any) -> int:
        rows = [row[kept.bool()].tolist() for row, kept in zip(tokens, real, strict=True)]
        asked = [{"prompt_token_ids": row} for row in rows]
        return sum(len(one.outputs[0].token_ids) for one in engine.generate(asked, greedy, use_tqdm=False))

    return {**speed(work, batches, write), "vllm": vllm.__version__, "machine": machine()}


@cache
def vllm_engine(folder: Path, rows: int) -> Any:
    from vllm import LLM

    return LLM(str(folder), dtype="bfloat16", max_num_seqs=rows, max_model_len=2048, gpu_memory_utilization=0.5)


# ---- Picture.


def draw(results: Path, file: Path) -> None:
    """Accuracy against tokens a forward pass, with 95% intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for path in sorted(results.glob("measured-*.json")):
        facts = json.loads(path.read_text())
        if facts.get("precision") == "fp32" and (results / path.name.replace("fp32", "bf16")).exists():
            continue
        share, (low, high) = facts["right"] / facts["problems"], facts["interval"]
        rate = facts["tokens_per_forward"]
        left, right = facts["tokens_per_forward_interval"] or (rate, rate)
        name = path.stem.removeprefix("measured-")
        if drafts := re.fullmatch(r"(\w+)-(\d+)-n(\d+)-(tails|strided)-(bf16|fp32)", name):
            recipe, block, size, layout, _ = drafts.groups()
            name = f"{RECIPES[recipe].label}, N = {size}" + f" (trained for {block})" * (block != size)
            name += " and mask tails" * (layout == "tails")
        axes.errorbar(
            [rate],
            [100 * share],
            xerr=[[max(0.0, rate - left)], [max(0.0, right - rate)]],
            yerr=[[100 * max(0.0, share - low)], [100 * max(0.0, high - share)]],
            fmt="o",
            capsize=3,
            label="autoregressive twin" if name == "twin" else name,
        )
    axes.set(
        xlabel="tokens per forward pass",
        ylabel="right answers, %",
        title="GSM8K's test problems, greedy, 95% intervals",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)


if __name__ == "__main__":
    sys.exit(main())
