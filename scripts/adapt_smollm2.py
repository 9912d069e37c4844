"""A published autoregressive model becomes a diffusion model of grade-school mathematics, beside two others: its
autoregressive twin, fine-tuned on the same rows, and the same adaptation by dLLM's own trainer.

    git clone https://github.com/openai/grade-school-math
    git clone https://github.com/ZHZisZZ/dllm
    python -m venv dllm-env && dllm-env/bin/pip install -e dllm trl==0.24.0 lm-eval==0.4.9.2
    python scripts/adapt_smollm2.py --data grade-school-math/grade_school_math/data \\
        --dllm dllm --dllm-python dllm-env/bin/python --output adapted

SmolLM2-135M-Instruct comes from the Python package that ships it (see demo.py), GSM8K from OpenAI's repository. All
three runs begin with the same weights and see the same conversations as often; learning rate, schedule, batch and
optimizer settings are the same, all else is each program's default. Then each model is measured by the same code:

    nats      a token of the held-out answers: exact for the twin, for a diffusion model a bound by Monte Carlo
    correct   greedy answers to held-out problems whose number after #### is right
    ended     those that end before they are cut

A row is printed as soon as it is known. What is finished is in --output and is not done again, and a training that was
cut off goes on from its last checkpoint; dLLM's begins anew. Without --dllm its row is left out. On two GPUs `--only`
divides the models over two calls with one --output, after one with `--only` alone, which writes what both begin with;
a last call without it gathers the figures.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from demo import dlm_bridge, fetch_published_model
from rich.console import Console
from rich.table import Table

MASK = "<|mask|>"  # dLLM's spelling
ANSWER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")
CALCULATOR = re.compile(r"<<.*?>>")
KINDS = ("autoregressive", "diffusion", "dLLM")
TITLES = {"autoregressive": "autoregressive twin", "diffusion": "diffusion", "dLLM": "diffusion by dLLM's trainer"}


@dataclass(frozen=True)
class Preset:
    """Sizes for a machine."""

    epochs: float
    batch: int  # conversations of a step
    length: int  # tokens of a row; longer conversations are left out
    lr: float
    precision: str
    problems: int  # held out, that are answered
    bounded: int  # held out, whose likelihood is measured
    samples: int  # Monte-Carlo draws of a bound
    new_tokens: int
    together: int  # answers that are sampled together
    rows: int | None = None  # training conversations; None: all


PRESETS = {
    "gpu": Preset(5, 64, 320, 3e-4, "bf16", 256, 256, 32, 192, 128),
    "cpu": Preset(1, 4, 192, 1e-4, "fp32", 4, 4, 4, 32, 4, rows=16),
}
SCHEDULE = {"lr-schedule": "cosine", "min-lr": 0, "weight-decay": 0, "beta1": 0.9, "beta2": 0.999, "clip-grad": 1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--output", type=Path, default=Path("adapted"), help="(default: %(default)s)")
    parser.add_argument("--preset", choices=PRESETS, default="gpu", help="(default: %(default)s)")
    parser.add_argument("--epochs", type=float, help="over the conversations; the preset's by default")
    parser.add_argument("--dllm", type=Path, help="a checkout of ZHZisZZ/dllm")
    parser.add_argument("--dllm-python", type=Path, help="a Python with dLLM's requirements")
    parser.add_argument(
        "--only", nargs="*", choices=KINDS, default=None, help="the models of this call; none: prepare"
    )
    given = parser.parse_args()
    if (given.dllm is None) != (given.dllm_python is None):
        parser.error("--dllm and --dllm-python belong together")
    preset = PRESETS[given.preset]
    root, console = given.output, Console(highlight=False)
    root.mkdir(parents=True, exist_ok=True)
    started, rows = prepare(console, root, given.data, preset)
    steps = max(1, round((given.epochs or preset.epochs) * rows["train"] / preset.batch))
    console.print(f"{rows['train']} conversations of {rows['tokens']} tokens, {steps} steps of {preset.batch}")

    found: dict[str, Any] = {
        "preset": given.preset,
        "sizes": asdict(preset),
        "steps": steps,
        "rows": rows,
        "models": {},
    }
    for kind in KINDS if given.dllm else KINDS[:2]:
        if given.only is not None and kind not in given.only:
            continue
        console.rule(f"[bold]{TITLES[kind]}")
        adaptation = Adaptation(console, kind, started[kind], root, preset, steps)
        training = adaptation.train_with_dllm(given.dllm, given.dllm_python) if kind == "dLLM" else adaptation.train()
        training["tokens_per_s"] = steps * preset.batch * rows["tokens"] / rows["train"] / training["seconds"]
        likelihood, answers = adaptation.likelihood(), adaptation.answers()
        found["models"][kind] = {"training": training, "likelihood": likelihood, "answers": answers}
        show(console, found)
    if not found["models"]:
        return 0
    show_texts(console, found)
    (root / "figures.json").write_text(json.dumps(found, indent=2) + "\n")
    draw(found, root / "curves.png")
    console.print(
        f"{root}/figures.json, {root}/curves.png; a sample: dlm-bridge generate {root}/diffusion/run --chat ..."
    )
    return 0


def kept(file: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `file` holds; computed and written where it is not there yet."""
    if not file.exists():
        result = compute()
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".partial")
        unfinished.write_text(json.dumps(result) + "\n")
        unfinished.replace(file)
    return dict(json.loads(file.read_text()))


def prepare(console: Console, root: Path, data: Path, preset: Preset) -> tuple[dict[str, Path], dict[str, int]]:
    """The models that the runs begin with, and the rows in --output: train.jsonl and test.jsonl of conversations."""
    published, diffusion = root / "smollm2", root / "smollm2-dlm"
    if not (published / "tokenizer.json").exists() and not fetch_published_model(console, published):
        raise SystemExit("the published model could not be fetched")
    if not diffusion.exists():
        dlm_bridge(console, "convert-to-dlm", published, diffusion, "--mask-token", MASK)
    counts = kept(root / "rows.json", lambda: write_rows(published, root / "rows", data, preset))
    return {"autoregressive": published, "diffusion": diffusion, "dLLM": diffusion}, counts


def write_rows(model: Path, folder: Path, data: Path, preset: Preset) -> dict[str, int]:
    """GSM8K's problems as conversations, without the calculator's annotations and those that are longer than a row."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split, limit in (("train", preset.rows), ("test", preset.problems)):
        with (data / f"{split}.jsonl").open(encoding="utf-8") as lines:
            problems = [json.loads(line) for line in lines]
        written, tokens = 0, 0
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as output:
            for problem in problems:
                said = (("user", problem["question"]), ("assistant", CALCULATOR.sub("", problem["answer"])))
                messages = [{"role": role, "content": text} for role, text in said]
                size = len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
                if size <= preset.length and (limit is None or written < limit):
                    output.write(json.dumps({"messages": messages}) + "\n")
                    written, tokens = written + 1, tokens + size
        counts[split] = written
        if split == "train":
            counts["tokens"] = tokens
    return counts


@dataclass(frozen=True)
class Adaptation:
    """One model: how it is trained and measured. What its folder in --output has already is read, not done again."""

    console: Console
    kind: str
    start: Path  # the model that it begins with
    root: Path
    preset: Preset
    steps: int

    @property
    def folder(self) -> Path:
        return self.root / self.kind

    @property
    def trained(self) -> Path:
        """The model that training left."""
        if self.kind == "dLLM":
            return self.folder / "checkpoint-final"
        return max((self.folder / "run" / "checkpoints").glob("step-*"))

    def train(self) -> dict[str, Any]:
        """`dlm-bridge sft`. Returns the seconds of its steps and its curve, (step, loss) each."""
        return kept(self.folder / "training.json", self._train)

    def train_with_dllm(self, checkout: Path, python: Path) -> dict[str, Any]:
        """dLLM's examples/a2d/mdlm/sft.py as it is, on the same weights and rows. Returns what `train` does."""
        return kept(self.folder / "training.json", partial(self._train_with_dllm, checkout, python))

    def likelihood(self) -> dict[str, Any]:
        """Nats of a held-out answer's token, and their standard error over the answers."""
        return kept(self.folder / "likelihood.json", self._likelihood)

    def answers(self) -> dict[str, Any]:
        """`dlm-bridge generate`, greedy, of the held-out problems: how many are right, and three of the texts."""
        return kept(self.folder / "answers.json", self._answers)

    def _train(self) -> dict[str, Any]:
        preset, run = self.preset, self.folder / "run"
        options: dict[str, Any] = SCHEDULE | {
            "steps": self.steps,
            "global-batch-size": preset.batch,
            "micro-batch-size": preset.batch,
            "seq-length": preset.length,
            "lr": preset.lr,
            "warmup-steps": self.steps // 10,
            "precision": preset.precision,
            "split": "1,0,0",
            "save-interval": max(1, self.steps // 5),
            "keep-last": 1,
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        words += ["--resume"] * run.exists()
        rows = self.root / "rows" / "train.jsonl"
        dlm_bridge(self.console, "sft", "--model", self.start, "--data", rows, "--output", run, *words)
        seconds, before, curve = 0.0, 0, []
        for logged in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            if "tokens_per_s" in logged:
                seconds += (logged["tokens"] - before) / logged["tokens_per_s"]
                before = logged["tokens"]
                curve.append((logged["step"], logged["loss"]))
        if logged["step"] < self.steps:
            raise SystemExit(f"stopped at step {logged['step']}: start again to go on")
        return {"seconds": seconds, "curve": curve}

    def _train_with_dllm(self, checkout: Path, python: Path) -> dict[str, Any]:
        preset, interval = self.preset, max(1, self.steps // 100)
        options = {
            "model_name_or_path": self.start.resolve(),
            "dataset_args": (self.root / "rows").resolve(),
            "output_dir": self.folder.resolve(),
            "max_length": preset.length,
            "max_steps": self.steps,
            "per_device_train_batch_size": preset.batch,
            "learning_rate": preset.lr,
            "warmup_ratio": 0.1,
            "bf16": preset.precision == "bf16",
            "dtype": "bfloat16" if preset.precision == "bf16" else "float32",
            "eval_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "logging_steps": interval,
            "disable_tqdm": True,
            "num_proc": 1,
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        command = [str(python.absolute()), "examples/a2d/mdlm/sft.py", *words]
        self.console.print("[bold green]$[/] " + " ".join(command), soft_wrap=True)
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve()), "HF_HUB_OFFLINE": "1"}
        seconds = 0.0
        curve: list[tuple[int, float]] = []
        with subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.console.print(line.rstrip(), markup=False, soft_wrap=True)
                logged = ast.literal_eval(line) if line.startswith(("{'loss'", "{'train_runtime'")) else {}
                seconds = float(logged.get("train_runtime", seconds))
                if "loss" in logged:
                    curve.append((min(self.steps, (len(curve) + 1) * interval), float(logged["loss"])))
        if process.returncode or not seconds:
            raise SystemExit("dLLM's trainer failed")
        return {"seconds": seconds, "curve": curve}

    def _likelihood(self) -> dict[str, Any]:
        from quality_measure import load, nats_of_answers, nats_per_token

        from dlm_bridge.evaluation.likelihood import Answer

        model, tokenizer = load(self.trained)
        encode = partial(tokenizer.apply_chat_template, tokenize=True, return_dict=False)
        answers = []
        for row in conversations(self.root / "rows" / "test.jsonl")[: self.preset.bounded]:
            asked, whole = encode(row[:-1], add_generation_prompt=True), encode(row)
            answers.append(Answer(tuple(asked), tuple(whole[len(asked) :])))
        nats = nats_of_answers(model, answers, self.preset.samples, self.preset.together)
        mean, error = nats_per_token(nats, [len(answer.answer) for answer in answers])
        return {"nats": mean, "error": error}

    def _answers(self) -> dict[str, Any]:
        preset, rows = self.preset, conversations(self.root / "rows" / "test.jsonl")
        asked, written = self.folder / "asked.jsonl", self.folder / "written.jsonl"
        asked.write_text("".join(json.dumps({"messages": row[:-1]}) + "\n" for row in rows))
        options: list[str | Path | float] = [
            "--gen-length",
            preset.new_tokens,
            "--temperature",
            0,
            "--batch-size",
            preset.together,
            "--dtype",
            preset.precision,
        ]
        if self.kind != "autoregressive":
            options += ["--block-length", 32, "--steps", preset.new_tokens]
        began = time.monotonic()
        files = ("--jsonl", asked, "--output", written, "--overwrite")
        dlm_bridge(self.console, "generate", self.trained, *files, *options)
        seconds = time.monotonic() - began
        found = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
        texts, ended = [row["text"] for row in found], sum(row["tokens"] < preset.new_tokens for row in found)
        right = [number(text) == number(row[-1]["content"]) for text, row in zip(texts, rows, strict=True)]
        samples = [{"question": row[0]["content"], "text": text} for row, text in zip(rows[:3], texts, strict=False)]
        return {"problems": len(rows), "correct": sum(right), "ended": ended, "seconds": seconds, "samples": samples}


def conversations(file: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]


def number(text: str) -> float | None:
    """The number after ####, None where there is none."""
    found = ANSWER.search(text)
    return None if found is None else float(found[1].replace(",", ""))


def show(console: Console, found: dict[str, Any]) -> None:
    table = Table("model", "training", "tokens/s", "held-out nats a token", "correct", "ended")
    for kind, model in found["models"].items():
        training, likelihood, answers = model["training"], model["likelihood"], model["answers"]
        table.add_row(
            TITLES[kind],
            f"{training['seconds']:.0f} s",
            f"{training['tokens_per_s']:,.0f}",
            f"{'' if kind == 'autoregressive' else '≤ '}{likelihood['nats']:.3f} ± {likelihood['error']:.3f}",
            f"{answers['correct']} of {answers['problems']} ({answers['correct'] / answers['problems']:.1%})",
            f"{answers['ended']} of {answers['problems']}",
        )
    console.print(table)


def show_texts(console: Console, found: dict[str, Any]) -> None:
    """What each model answers to the same problems."""
    models = found["models"]
    for answers in zip(*(model["answers"]["samples"] for model in models.values()), strict=True):
        console.rule("[bold]a held-out problem")
        console.print(answers[0]["question"], markup=False)
        for kind, answer in zip(models, answers, strict=True):
            console.print(f"[bold]{TITLES[kind]}")
            console.print(answer["text"], markup=False)


def draw(found: dict[str, Any], file: Path) -> None:
    """Training loss against conversations seen; each program's own estimate of it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for kind, model in found["models"].items():
        curve = model["training"]["curve"]
        width = max(1, len(curve) // 50)  # a diffusion model's loss is noisy: means of neighbouring steps
        parts = [curve[start : start + width] for start in range(0, len(curve), width)]
        means = [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]
        axes.plot(*zip(*means, strict=True), label=TITLES[kind])
    axes.set(xlabel="step", ylabel="training loss, nats a token", yscale="log", title="SmolLM2-135M on GSM8K")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(file)


if __name__ == "__main__":
    sys.exit(main())
