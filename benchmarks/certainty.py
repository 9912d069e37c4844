r"""Certainty-forcing and trajectory distillation: accuracy and forward passes per token of a small model with each.

    python benchmarks/certainty.py                                   on one GPU, some minutes
    python benchmarks/certainty.py --digits 2 --steps 60 --more 30 --size tiny --batch 64 --rows 32 --examples 2000 \
        --recorded 64 --keep                                         on a CPU

A model is trained from nothing to add two numbers (`dlm-bridge sft`, objective masked). Four runs go on from its last
checkpoint: in the same way ("plain"), with `--certainty-weight` ("certain"), with objective trajectory on what the
model itself wrote for `--recorded` training prompts, a token a step, where it was right ("trajectory"), and with both
("both"). Each is sampled greedily on sums that no training row holds, by Fast-dLLM's rule: a step commits every token
above a threshold, the best at least. A line for each model and threshold: exact answers, digits that are right,
forward passes per token. The last lines compare equal accuracies: the fewest forward passes per token of a run among
the thresholds at which it is as accurate as "plain" at its best, and those of "plain" at that best. With --json FILE
each line is appended there.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import dlm_bridge  # noqa: F401

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 64},
    "small": {"d_model": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 768},
}
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
EOS, MASK = "<eos>", "<mask>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", type=int, default=12)
    parser.add_argument("--examples", type=int, default=200_000)
    parser.add_argument("--rows", type=int, default=512, help="sums that are sampled")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3000, help="of the first run")
    parser.add_argument("--more", type=int, default=1500, help="of those that go on from it")
    parser.add_argument("--recorded", type=int, default=50_000, help="prompts whose trajectories are recorded")
    parser.add_argument("--keep", action="store_true", help="keep wrong answers among the trajectories too")
    parser.add_argument("--weight", type=float, default=2.0)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        bench.write()
        base = bench.train("base", bench.folder / "seed", options.steps, "--from-scratch")
        certainty = ("--certainty-weight", str(options.weight), "--certainty-temperature", str(options.temperature))
        found = {"base": bench.evaluate("base", base)}
        recorded = bench.record(base)
        runs: dict[str, tuple[Path | None, tuple[str, ...]]] = {
            "plain": (None, ()),
            "certain": (None, certainty),
            "trajectory": (recorded, ()),
            "both": (recorded, certainty),
        }
        for name, (trajectories, flags) in runs.items():
            found[name] = bench.evaluate(
                name, bench.train(name, base, options.more, *flags, trajectories=trajectories)
            )
        for name in list(runs)[1:]:
            bench.compare(name, found["plain"], found[name])


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        drawn = random.Random(0)
        most = 10**options.digits
        self.held = [(drawn.randrange(most), drawn.randrange(most)) for _ in range(options.rows)]
        self.known = [(drawn.randrange(most), drawn.randrange(most)) for _ in range(options.examples)]

    def write(self) -> None:
        """Config, tokenizer and training rows."""
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
            max_sequence_length=4 * (self.options.digits + 2),
            architectures=["LLaDAModelLM"],
        ).save_pretrained(seed)
        held = set(self.held)
        with (self.folder / "sums.jsonl").open("w") as file:
            for pair in self.known:
                if pair not in held:
                    file.write(json.dumps({"prompt": self.prompt(pair), "completion": self.answer(pair)}) + "\n")

    def prompt(self, pair: tuple[int, int]) -> str:
        return "+".join(f"{number:0{self.options.digits}d}" for number in pair) + "="

    def answer(self, pair: tuple[int, int]) -> str:
        return f"{sum(pair):0{self.options.digits + 1}d}"

    def train(self, name: str, model: Path, steps: int, *flags: str, trajectories: Path | None = None) -> Path:
        """The last checkpoint of a run."""
        output = self.folder / name
        precision = "bf16" if self.device == "cuda" else "fp32"
        command = [sys.executable, "-m", "dlm_bridge.cli", "sft", "--model", str(model), "--output", str(output)]
        command += ["--data", str(trajectories or self.folder / "sums.jsonl"), "--split", "100,0,0"]
        command += ["--objective", "trajectory" if trajectories else "masked", "--seq-length", str(self.length)]
        command += ["--eos-padding", "none", "--precision", precision, "--lr", "1e-3"]
        command += ["--global-batch-size", str(self.options.batch), "--steps", str(steps), "--warmup-steps", "20"]
        command += ["--save-interval", str(steps), "--eval-interval", "0", *flags]
        self.call(name, command)
        losses = [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]
        print(
            f"{name}: {steps} steps, loss {losses[0]:.3f} to {sum(losses[-20:]) / len(losses[-20:]):.3f}", flush=True
        )
        (checkpoint,) = (output / "checkpoints").glob("step-*")
        return checkpoint

    def record(self, model: Path) -> Path:
        """The trajectories of the right answers that a model gives to training prompts."""
        prompts, output, kept = (self.folder / f"{name}.jsonl" for name in ("prompts", "answers", "trajectories"))
        held, length = set(self.held), self.options.digits + 2
        pairs = [pair for pair in self.known if pair not in held][: self.options.recorded]
        prompts.write_text("".join(json.dumps({"prompt": self.prompt(pair)}) + "\n" for pair in pairs))
        command = [sys.executable, "-m", "dlm_bridge.cli", "generate", str(model), "--jsonl", str(prompts)]
        command += ["--output", str(output), "--batch-size", str(self.options.batch), "--commit-steps"]
        command += [*("--gen-length", str(length)), *("--steps", str(length)), *("--block-length", str(length))]
        self.call("generate", command)
        with output.open() as lines, kept.open("w") as file:
            count = 0
            for pair, line in zip(pairs, lines, strict=True):
                if self.options.keep or json.loads(line)["text"].replace(" ", "") == self.answer(pair):
                    file.write(line)
                    count += 1
        print(f"trajectories: {count} of {len(pairs)}", flush=True)
        return kept

    def call(self, name: str, command: list[str]) -> None:
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"the run {name} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")

    @property
    def length(self) -> int:
        """Tokens of a row: two numbers, plus and equals, the sum and the end."""
        return 3 * self.options.digits + 4

    def evaluate(self, name: str, folder: Path) -> list[dict[str, Any]]:
        """A line for each threshold."""
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        model.to(self.device).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = torch.tensor([tokenizer(self.prompt(pair))["input_ids"] for pair in self.held], device=self.device)
        answers = [tokenizer(self.answer(pair))["input_ids"] for pair in self.held]
        wanted = torch.tensor(answers, device=self.device)
        lines = []
        for threshold in THRESHOLDS:
            output = model.generate(
                prompts, gen_length=wanted.shape[1], block_length=wanted.shape[1], threshold=threshold,
                eos_token_id=None, return_dict_in_generate=True,
            )  # fmt: skip
            right = output.sequences[:, prompts.shape[1] :] == wanted
            line = {
                "model": name,
                "threshold": threshold,
                "exact": round(right.all(dim=1).float().mean().item(), 4),
                "digits": round(right.float().mean().item(), 4),
                "forwards_per_token": round(1 / output.tokens_per_forward, 4),
            }
            self.print(line)
            lines.append(line)
        return lines

    def compare(self, name: str, plain: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
        best = max(plain, key=lambda line: (line["exact"], -line["forwards_per_token"]))
        equal = [line for line in other if line["exact"] >= best["exact"]]
        fewest = min(equal, key=lambda line: line["forwards_per_token"], default=None)
        line = {
            "plain_exact": best["exact"],
            "plain_forwards_per_token": best["forwards_per_token"],
            f"{name}_exact": None if fewest is None else fewest["exact"],
            f"{name}_forwards_per_token": None if fewest is None else fewest["forwards_per_token"],
        }
        self.print(line)

    def print(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if self.options.json:
            with self.options.json.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
