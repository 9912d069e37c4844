"""Certainty-forcing: accuracy and forward passes per token of a small model before, with and without it.

    python benchmarks/certainty.py                                   on one GPU, some minutes
    python benchmarks/certainty.py --digits 2 --steps 60 --more 30 --size tiny --batch 64 --rows 32     on a CPU

A model is trained from nothing to add two numbers (`dlm-bridge sft`, objective masked). Two runs go on from its last
checkpoint, one in the same way ("plain"), one with `--certainty-weight` ("certain"). Each is sampled greedily
on sums that no training row holds, by Fast-dLLM's rule: a step commits every token above a threshold, the best at
least. A line for each model and threshold: exact answers, digits that are right, forward passes per token. The last
line compares equal accuracies: the fewest forward passes per token of "certain" among the thresholds at which it is
as accurate as "plain" at its best, and those of "plain" at that best. With --json FILE each line is appended there.
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
    parser.add_argument("--more", type=int, default=1500, help="of the two that go on from it")
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
        for name, flags in (("plain", ()), ("certain", certainty)):
            found[name] = bench.evaluate(name, bench.train(name, base, options.more, *flags))
        bench.compare(found["plain"], found["certain"])


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

    def train(self, name: str, model: Path, steps: int, *flags: str) -> Path:
        """The last checkpoint of a run."""
        output = self.folder / name
        precision = "bf16" if self.device == "cuda" else "fp32"
        command = [sys.executable, "-m", "dlm_bridge.cli", "sft", "--model", str(model), "--output", str(output)]
        command += ["--data", str(self.folder / "sums.jsonl"), "--split", "100,0,0", "--seq-length", str(self.length)]
        command += ["--objective", "masked", "--eos-padding", "none", "--precision", precision, "--lr", "1e-3"]
        command += ["--global-batch-size", str(self.options.batch), "--steps", str(steps), "--warmup-steps", "20"]
        command += ["--save-interval", str(steps), "--eval-interval", "0", *flags]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"the run {name} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
        losses = [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]
        print(
            f"{name}: {steps} steps, loss {losses[0]:.3f} to {sum(losses[-20:]) / len(losses[-20:]):.3f}", flush=True
        )
        (checkpoint,) = (output / "checkpoints").glob("step-*")
        return checkpoint

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

    def compare(self, plain: list[dict[str, Any]], certain: list[dict[str, Any]]) -> None:
        best = max(plain, key=lambda line: (line["exact"], -line["forwards_per_token"]))
        equal = [line for line in certain if line["exact"] >= best["exact"]]
        fewest = min(equal, key=lambda line: line["forwards_per_token"], default=None)
        line = {
            "plain_exact": best["exact"],
            "plain_forwards_per_token": best["forwards_per_token"],
            "certain_exact": None if fewest is None else fewest["exact"],
            "certain_forwards_per_token": None if fewest is None else fewest["forwards_per_token"],
        }
        self.print(line)

    def print(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if self.options.json:
            with self.options.json.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
