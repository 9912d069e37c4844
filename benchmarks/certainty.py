r"""Certainty-forcing and trajectory distillation: accuracy and forward passes per token of a small model with each.

    python benchmarks/certainty.py --output DIR                      on one GPU, eight minutes
    python benchmarks/certainty.py --output DIR --size tiny --digits 4 --batch 128 --steps 4000 --more 1500 \
        --more-lr 1e-3 --rows 256 --examples 40000 --recorded 6000   on a CPU, half an hour

The tasks, by `--task`:

  terms  a row of digits is given; asked for are two rows that add up to it, place by place, modulo 10. The first of
         them is random in the data: an answer has 10^digits right wordings, as text has many.
  sums   two numbers are given, their sum is asked for: one right answer.

A model is trained from nothing (`dlm-bridge sft`, objective masked). Three runs go on from its last checkpoint:
"plain" in the same way; "own", as in the publications, on what the model itself wrote for `--recorded` training
prompts, a token a step, where it was right; "certain" on the same with `--certainty-weight`. Then "own" writes answers
in its turn, by the sampler that is measured, at `--record-threshold`, and four runs go on from it with those: "again"
with the same loss; "trajectory" with the objective trajectory, whose masks all have a loss; "complement" with it and
`--trajectory-complement 0.5`; "both" with the objective trajectory and certainty-forcing.

Each is sampled greedily for prompts that no training row holds, by Fast-dLLM's rule: a step commits every token above
a threshold, the best at least. A line for each model and threshold: right answers, forward passes per token. The last
lines compare equal accuracies: the fewest forward passes per token of a run among the thresholds at which it is as
accurate as the one before ("plain", "own") at its best, and those of that.

DIR/results.jsonl has the same lines. What DIR holds already is not done again: a killed run goes on. On a GPU the runs
that go on are trained at the same time.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import dlm_bridge  # noqa: F401

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 128},
    "small": {"d_model": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 768},
}
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)
EOS, MASK = "<eos>", "<mask>"

Runs = dict[str, tuple[Path, tuple[str, ...]]]  # training data and flags of each
Lines = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--task", choices=("terms", "sums"), default="terms")
    parser.add_argument("--digits", type=int, default=6)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=512, help="prompts that are sampled")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3000, help="of the first run")
    parser.add_argument("--more", type=int, default=3000, help="of those that go on from it")
    parser.add_argument("--more-lr", type=float, default=2e-4, help="their learning rate")
    parser.add_argument("--last", type=int, default=1000, help="steps of those that go on from `own`")
    parser.add_argument("--last-lr", type=float, default=3e-4, help="their learning rate")
    parser.add_argument("--recorded", type=int, default=32_000, help="prompts whose answers are recorded")
    parser.add_argument("--record-threshold", type=float, default=0.9, help="of the answers that `own` writes")
    parser.add_argument("--weight", type=float, default=2.0)
    parser.add_argument("--temperature", type=float, default=0.5)
    bench = Bench(parser.parse_args())
    options = bench.options
    bench.write()
    base = bench.train("base", bench.folder / "seed", options.steps, bench.rows, "--from-scratch")
    bench.evaluate("base", base)
    length = str(bench.gen_length)
    certainty = ("--certainty-weight", str(options.weight), "--certainty-temperature", str(options.temperature))
    answers = bench.record("base", base, "--steps", length)
    runs: Runs = {"plain": (bench.rows, ()), "own": (answers, ()), "certain": (answers, certainty)}
    found, folders = bench.go_on(runs, base, options.more, options.more_lr)
    trajectory = ("--objective", "trajectory", "--trajectory-steps", length)
    answers = bench.record("own", folders["own"], "--threshold", str(options.record_threshold))
    runs = {
        "again": (answers, ()),
        "trajectory": (answers, trajectory),
        "complement": (answers, (*trajectory, "--trajectory-complement", "0.5")),
        "both": (answers, (*trajectory, *certainty)),
    }
    found |= bench.go_on(runs, folders["own"], options.last, options.last_lr)[0]
    for reference, names in (("plain", ("own", "certain")), ("own", ("certain", *runs))):
        for name in names:
            bench.compare(reference, found[reference], name, found[name])


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.output
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.rows = self.folder / "rows.jsonl"
        self.results = self.folder / "results.jsonl"
        drawn = random.Random(0)
        held = [self.draw(drawn) for _ in range(options.rows)]
        self.held, out = [prompt for prompt, _ in held], dict(held)
        known = [self.draw(drawn) for _ in range(options.examples)]
        self.known = [(prompt, answer) for prompt, answer in known if prompt not in out]

    def draw(self, drawn: random.Random) -> tuple[str, str]:
        """A random prompt and a right answer to it."""
        size = self.options.digits
        first, second = (f"{drawn.randrange(10**size):0{size}d}" for _ in range(2))
        if self.options.task == "sums":
            return f"{first}+{second}=", f"{int(first) + int(second):0{size + 1}d}"
        return f"{added(first, second)}=", f"{first}+{second}"

    def right(self, prompt: str, answer: str) -> bool:
        size = self.options.digits
        if self.options.task == "sums":
            first, _, second = prompt[:-1].partition("+")
            return answer == f"{int(first) + int(second):0{size + 1}d}"
        first, _, second = answer.partition("+")
        digits = len(first) == len(second) == size and (first + second).isdecimal()
        return digits and added(first, second) == prompt[:-1]

    @property
    def gen_length(self) -> int:
        """Tokens of an answer and its end."""
        return self.options.digits + 2 if self.options.task == "sums" else 2 * self.options.digits + 2

    @property
    def seq_length(self) -> int:
        return len(self.held[0]) + self.gen_length

    def write(self) -> None:
        """Config, tokenizer and training rows; the options of an output folder stay the same."""
        self.folder.mkdir(parents=True, exist_ok=True)
        options = {name: value for name, value in vars(self.options).items() if name != "output"}
        recorded = self.folder / "options.json"
        if recorded.exists():
            if json.loads(recorded.read_text()) != options:
                raise SystemExit(f"{self.folder} is of other options: {recorded.read_text()}")
            return
        seed = self.folder / "seed"
        symbols = {symbol: number for number, symbol in enumerate([EOS, MASK, *"0123456789+="])}
        characters = Tokenizer(models.WordLevel(symbols, unk_token=EOS))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token=EOS, mask_token=MASK)
        tokenizer.save_pretrained(seed)
        size = len(symbols)
        AutoConfig.for_model(
            "llada",
            **SIZES[self.options.size],
            vocab_size=size,
            embedding_size=size,
            mask_token_id=symbols[MASK],
            eos_token_id=symbols[EOS],
            pad_token_id=symbols[EOS],
            max_sequence_length=self.seq_length,
            architectures=["LLaDAModelLM"],
        ).save_pretrained(seed)
        with self.rows.open("w") as file:
            for prompt, answer in self.known:
                file.write(json.dumps({"prompt": prompt, "completion": answer}) + "\n")
        recorded.write_text(json.dumps(options))

    def train(self, name: str, model: Path, steps: int, data: Path, *flags: str, lr: float = 1e-3) -> Path:
        """The last checkpoint of a run."""
        output = self.folder / name
        checkpoint = output / "checkpoints" / f"step-{steps:07d}"
        precision = "bf16" if self.device == "cuda" else "fp32"
        command = [sys.executable, "-m", "dlm_bridge.cli", "sft", "--model", str(model), "--output", str(output)]
        command += ["--data", str(data), "--split", "100,0,0", "--seq-length", str(self.seq_length)]
        command += ["--eos-padding", "none", "--precision", precision, "--lr", str(lr)]
        command += ["--global-batch-size", str(self.options.batch), "--steps", str(steps), "--warmup-steps", "20"]
        command += ["--save-interval", str(max(1, steps // 4)), "--eval-interval", "0", "--keep-last", "1", *flags]
        if not checkpoint.exists():
            self.call(name, [*command, "--resume"] if output.exists() else command)
        losses = [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]
        last = losses[-20:]
        print(f"{name}: {steps} steps, loss {losses[0]:.3f} to {sum(last) / len(last):.3f}", flush=True)
        return checkpoint

    def go_on(self, runs: Runs, model: Path, steps: int, lr: float) -> tuple[dict[str, Lines], dict[str, Path]]:
        """Train each run from a model. Returns the lines and the last checkpoint of each."""
        with ThreadPoolExecutor(len(runs) if self.device == "cuda" else 1) as threads:
            started = {
                name: threads.submit(self.train, name, model, steps, data, *flags, lr=lr)
                for name, (data, flags) in runs.items()
            }
            folders = {name: run.result() for name, run in started.items()}
        return {name: self.evaluate(name, folder) for name, folder in folders.items()}, folders

    def record(self, name: str, model: Path, *sampling: str) -> Path:
        """The right answers that a model gives to training prompts, with the steps that committed their tokens."""
        prompts = self.folder / "prompts.jsonl"
        output, kept = self.folder / f"answers-{name}.jsonl", self.folder / f"trajectories-{name}.jsonl"
        asked = [prompt for prompt, _ in self.known][: self.options.recorded]
        if not output.exists() or len(output.read_text().splitlines()) < len(asked):
            prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))
            length = str(self.gen_length)
            command = [sys.executable, "-m", "dlm_bridge.cli", "generate", str(model), "--jsonl", str(prompts)]
            command += ["--output", str(output), "--overwrite", "--batch-size", str(self.options.batch)]
            command += ["--gen-length", length, "--block-length", length, "--commit-steps", *sampling]
            self.call("generate", command)
        count, steps = 0, 0
        with output.open() as lines, kept.open("w") as file:
            for prompt, line in zip(asked, lines, strict=True):
                row = json.loads(line)
                if self.right(prompt, row["text"].replace(" ", "")):
                    file.write(line)
                    count += 1
                    steps += 1 + max(row["commit_steps"])
        print(f"{name}: {count} of {len(asked)} answers are right, {steps / max(count, 1):.1f} steps each", flush=True)
        return kept

    def call(self, name: str, command: list[str]) -> None:
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"the run {name} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")

    def evaluate(self, name: str, folder: Path) -> Lines:
        """A line for each threshold."""
        known = [json.loads(line) for line in self.results.read_text().splitlines()] if self.results.exists() else []
        lines = [line for line in known if line.get("model") == name]
        model: Any = None
        for threshold in THRESHOLDS[len(lines) :]:
            if model is None:
                model = AutoModelForCausalLM.from_pretrained(folder).to(self.device).eval()
                tokenizer = AutoTokenizer.from_pretrained(folder)
                prompts = torch.tensor([tokenizer(prompt)["input_ids"] for prompt in self.held], device=self.device)
            output = model.generate(
                prompts, gen_length=self.gen_length, block_length=self.gen_length, threshold=threshold,
                eos_token_id=None, return_dict_in_generate=True,
            )  # fmt: skip
            right = 0
            for prompt, row in zip(self.held, output.sequences[:, prompts.shape[1] :].tolist(), strict=True):
                symbols = tokenizer.convert_ids_to_tokens(row)
                right += symbols[-1] == EOS and self.right(prompt, "".join(symbols[:-1]))
            line = {
                "model": name,
                "threshold": threshold,
                "right": round(right / len(self.held), 4),
                "forwards_per_token": round(1 / output.tokens_per_forward, 4),
            }
            self.print(line)
            lines.append(line)
        return lines

    def compare(self, reference: str, plain: Lines, name: str, other: Lines) -> None:
        best = max(plain, key=lambda line: (line["right"], -line["forwards_per_token"]))
        if not best["right"]:
            raise SystemExit(f"{reference} gives no right answer: train for more --steps")
        equal = [line for line in other if line["right"] >= best["right"]]
        fewest = min(equal, key=lambda line: line["forwards_per_token"], default=None)
        line = {
            f"{reference}_right": best["right"],
            f"{reference}_forwards_per_token": best["forwards_per_token"],
            f"{name}_right": None if fewest is None else fewest["right"],
            f"{name}_forwards_per_token": None if fewest is None else fewest["forwards_per_token"],
        }
        self.print(line)

    def print(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


def added(first: str, second: str) -> str:
    """Digits added place by place, modulo 10."""
    return "".join(str((int(one) + int(other)) % 10) for one, other in zip(first, second, strict=True))


if __name__ == "__main__":
    main()
