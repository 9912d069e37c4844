"""Countdown on one machine, offline: a small diffusion model is fine-tuned on solutions and then trained with rewards;
held-out accuracy before and after, checked exactly, goes to a table, a JSON file and a figure."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "configs"
EOS, MASK = "<eos>", "<mask>"
SIGNS = "+-*/()=,:"
HELD_OUT = 512  # problems
FORWARDS = (1, 4, 8)  # of the sampler for an answer of 8 tokens
ENGINES = ("accelerate", "megatron")
MEASURED = "countdown.json"  # in the folder of a run of reinforcement learning
# What a CPU can do in minutes: a smaller model and smaller numbers.
TINY_MODEL = {"d_model": 128, "n_heads": 4, "n_kv_heads": 4, "n_layers": 3, "mlp_hidden_size": 256}
TINY_SFT = "--steps 1500 --global-batch-size 128 --precision fp32 --warmup-steps 20 --exit-duration 60"
TINY_RL = (
    "--method diffu-grpo --generation steps=1 --prompt-masking 0 --group-size 8 --steps 100 --precision fp32 "
    "--eval-interval 25 --exit-duration 60"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("countdown-output"), help="emptied first (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model and numbers for a CPU")
    parser.add_argument("--seed", type=int, default=0, help="of data, weights, noise and rollouts (%(default)s)")
    parser.add_argument("--sft", default="", help="further options of dlm-bridge sft, in one string")
    parser.add_argument("--rl", default="", help="further options of dlm-bridge rl, in one string")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=ENGINES[:1],
        help="that train with rewards, each from the same start into a folder of its own; the figure has all that are "
        "in --output",
    )  # fmt: skip
    parser.add_argument("--megatron", default="", help="further options of --engine megatron, such as '--tp 2'")
    parser.add_argument("--processes", type=int, default=1, help="of reinforcement learning (%(default)s)")
    parser.add_argument("--keep-sft", action="store_true", help="take the SFT run that --output has")
    parser.add_argument(
        "--limit", type=float, help="seconds after which a command is killed; the other engine goes on"
    )
    given = parser.parse_args()
    root: Path = given.output
    console = Console()
    mark = root / ".dlm-bridge-countdown"
    if root.exists() and not mark.exists():
        console.print(f"{root} exists and is not from an earlier run: choose another --output")
        return 2
    if not given.keep_sft:
        shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    mark.touch()

    largest, highest, solved, unsolved = (15, 60, 3000, 3000) if given.tiny else (40, 100, 10_000, 25_000)
    solutions, train, held_out = (root / f"{name}.jsonl" for name in ("solutions", "problems", "held-out"))
    seed = ["--seed", str(given.seed)]
    times: dict[str, float] = {}
    if not given.keep_sft:
        console.rule("[bold]1  problems, a tokenizer and an empty model")
        write_problems([(held_out, HELD_OUT), (solutions, solved), (train, unsolved)], largest, highest, given.seed)
        write_model(root / "seed", highest, TINY_MODEL if given.tiny else {})
        console.print(
            f"numbers to {largest}, targets to {highest}: {solved} problems with a solution, {unsolved} without, "
            f"{HELD_OUT} held out"
        )
        console.rule("[bold]2  fine-tuning on solutions")
        times["sft"] = dlm_bridge(
            console, "sft", "--config", RECIPES / "rl_countdown_sft.yaml", "--model", root / "seed",
            "--data", solutions, "--output", root / "sft", *seed,
            *shlex.split(TINY_SFT if given.tiny else ""), *shlex.split(given.sft), limit=given.limit,
        )  # fmt: skip
    began = sorted((root / "sft" / "checkpoints").glob("step-*"))[-1]

    console.rule("[bold]3  reinforcement learning on other problems, without solutions")
    problems = [json.loads(line) for line in held_out.read_text().splitlines()]
    failed = []
    for engine in given.engines:
        output, more = root / f"rl-{engine}", ["--engine", engine]
        shutil.rmtree(output, ignore_errors=True)
        try:
            seconds = dlm_bridge(
                console, "rl", "--config", RECIPES / "rl_countdown.yaml", "--model", began, "--data", train,
                "--eval-data", held_out, "--output", output, *seed, *more,
                *shlex.split(TINY_RL if given.tiny else ""), *shlex.split(given.rl),
                *shlex.split(given.megatron if engine == "megatron" else ""),
                processes=given.processes, limit=given.limit,
            )  # fmt: skip
        except subprocess.SubprocessError as error:  # the other engine's run is worth its figures
            console.print(f"{engine}: {error}", style="red", highlight=False)
            failed.append(engine)
            continue
        ended = output / "exported"
        if engine == "megatron":
            dlm_bridge(console, "export", output / "checkpoints", ended, "--overwrite")
        else:
            ended = sorted((output / "checkpoints").glob("step-*"))[-1]
        shares = [accuracy(ended, problems, forwards) for forwards in FORWARDS]
        measured = {"processes": given.processes, "seconds": seconds, "accuracy": shares}
        (output / MEASURED).write_text(json.dumps(measured))
        console.print(f"{engine}: {json.dumps(measured)}", highlight=False, soft_wrap=True)

    console.rule("[bold]4  held-out problems, answered greedily and checked exactly")
    before = [accuracy(began, problems, forwards) for forwards in FORWARDS]
    runs = {
        engine: read_run(root / f"rl-{engine}") for engine in ENGINES if (root / f"rl-{engine}" / MEASURED).exists()
    }
    if runs:
        report(console, root, given, before, runs, times)
    return 1 if failed else 0


def read_run(output: Path) -> dict[str, Any]:
    """What a run of reinforcement learning has left."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if row["eval_rewards"] is not None]
    settings = yaml.safe_load((output / "config.yaml").read_text())["rl"]["generation"]
    return {
        **json.loads((output / MEASURED).read_text()),
        "forwards": int(dict(setting.split("=") for setting in settings)["steps"]),
        "steps": [row["step"] for row in rows],
        "reward": [row["rewards"]["countdown"] for row in rows],
        "held_out": [[row["step"], row["eval_rewards"]["countdown"]] for row in evaluated],
        "seconds_of_a_step": {
            part: statistics.median(row["seconds"][part] for row in rows) for part in rows[0]["seconds"]
        },
    }


def write_problems(files: list[tuple[Path, int]], largest: int, highest: int, seed: int) -> None:
    """Problems of three numbers, each with a solution, so many in each file; no two in all files have the same
    numbers, in whatever order, and the same target."""
    draw = random.Random(seed)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    count = sum(number for _, number in files)
    while len(found) < count:
        numbers = [draw.randint(1, largest) for _ in range(3)]
        solution, target = expression(numbers, draw)
        if target is not None and 1 <= target <= highest:
            shown = numbers[:]
            draw.shuffle(shown)
            prompt = ",".join(map(str, shown)) + f"={target}:"
            row = {"prompt": prompt, "completion": solution, "numbers": shown, "target": target}
            found.setdefault((*sorted(numbers), target), row)
    problems = list(found.values())
    draw.shuffle(problems)
    for path, number in files:
        path.write_text("".join(json.dumps(problems.pop()) + "\n" for _ in range(number)))


def expression(numbers: list[int], draw: random.Random) -> tuple[str, int | None]:
    """A random expression of the numbers in a random order, and its value: None unless all steps are whole."""
    a, b, c = draw.sample(numbers, 3)
    first, second = draw.choice("+-*/"), draw.choice("+-*/")
    left = draw.random() < 0.5
    inner = apply(first, a, b)
    if inner is None:
        return "", None
    value = apply(second, inner, c) if left else apply(second, c, inner)
    return (f"({a}{first}{b}){second}{c}" if left else f"{c}{second}({a}{first}{b})"), value


def apply(sign: str, left: int, right: int) -> int | None:
    if sign == "/":
        return left // right if right and left % right == 0 else None
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def write_model(folder: Path, highest: int, sizes: dict[str, int]) -> None:
    """A config.json, and a tokenizer whose tokens are whole numbers and signs."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [EOS, MASK, *SIGNS, *map(str, range(highest + 1))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+|\D"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, mask_token=MASK, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
    config = json.loads((RECIPES / "rl_countdown.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def dlm_bridge(console: Console, *words: Any, processes: int = 1, limit: float | None = None) -> float:
    """Run a command as a user would, several processes under torchrun; the seconds that it took. Raises
    subprocess.SubprocessError where it fails, or takes longer than `limit` and is killed."""
    command = [str(word) for word in words]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    shown = f"torchrun --nproc-per-node {processes} -m dlm_bridge.cli" if launcher else "dlm-bridge"
    console.print(f"$ {shown} {shlex.join(command)}", style="bold cyan", highlight=False, soft_wrap=True)
    began = time.monotonic()
    subprocess.run([sys.executable, *launcher, "-m", "dlm_bridge.cli", *command], check=True, timeout=limit)
    return time.monotonic() - began


def accuracy(folder: Path, problems: list[dict[str, Any]], forwards: int) -> float:
    """The share of problems that a checkpoint's greedy answer solves, sampled in so many forwards."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import dlm_bridge  # noqa: F401  registers the families
    from dlm_bridge.train.rl.rewards import countdown_solved

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [problem["prompt"] for problem in problems]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    output = model.generate(
        batch["input_ids"].to(device),
        attention_mask=batch["attention_mask"].to(device),
        gen_length=8,
        steps=forwards,
        temperature=0.0,
    )
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(countdown_solved(prompts, texts, problems)) / len(problems)


def report(
    console: Console,
    root: Path,
    given: argparse.Namespace,
    before: list[float],
    runs: dict[str, dict[str, Any]],
    times: dict[str, float],
) -> None:
    """The table, ROOT/countdown.json and ROOT/countdown.png, of all runs by their engine."""
    import torch

    error = max(interval(share) for share in [*before, *(share for run in runs.values() for share in run["accuracy"])])
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "seed": given.seed,
        "held_out_problems": HELD_OUT,
        "forwards_of_an_answer": FORWARDS,
        "accuracy_after_sft": before,
        "confidence_95": error,
        "seconds": times,
        "rl": runs,
    }
    (root / "countdown.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(runs, before, given.seed, root / "countdown.png")

    table = Table(title=f"Countdown, three numbers: {HELD_OUT} held-out problems solved, seed {given.seed}")
    for column in ("", *(f"{number} forwards" for number in FORWARDS), "seconds"):
        table.add_column(column)
    table.add_row("after fine-tuning", *(f"{share:.1%}" for share in before), f"{times.get('sft', 0):.0f}")
    for engine, run in runs.items():
        name = f"after reinforcement learning, {engine}, {run['processes']} process(es)"
        table.add_row(name, *(f"{share:.1%}" for share in run["accuracy"]), f"{run['seconds']:.0f}")
    console.print(table)
    console.print(
        f"95% interval: +-{error:.1%}; {root}/countdown.json, countdown.png", highlight=False, soft_wrap=True
    )


def interval(share: float) -> float:
    """Half the 95% interval of a share of the held-out problems."""
    return 1.96 * (share * (1 - share) / HELD_OUT) ** 0.5


def draw(runs: dict[str, dict[str, Any]], began: list[float], seed: int, path: Path) -> None:
    """The figure: rewards of sampled completions, and held-out accuracy with its interval, `began` before the first
    step, of all engines. The axis is that of what is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    from dlm_bridge.train.metrics import moving_average

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step of reinforcement learning", ylabel="problems solved")
    axes.set_title(f"Countdown, three numbers, seed {seed}")
    drawn: list[float] = []
    for number, (engine, run) in enumerate(runs.items()):
        of = f"{engine}: " if len(runs) > 1 else ""
        sampled, answered = f"C{2 * number}", f"C{2 * number + 1}"
        span = max(len(run["reward"]) // 20, 1) | 1
        axes.plot(run["steps"], run["reward"], color=sampled, linewidth=0.6, alpha=0.35)
        label = f"{of}sampled completions" + (f", averaged over {span} steps" if span > 1 else "")
        axes.plot(run["steps"], moving_average(run["reward"], span), linewidth=1.5, color=sampled, label=label)
        forwards = run["forwards"]
        steps, shares = zip((0, began[FORWARDS.index(forwards)]), *run["held_out"], strict=True)
        errors = [interval(share) for share in shares]
        label = f"{of}held-out problems, greedy, {forwards} forward{'s' * (forwards > 1)} an answer, 95% interval"
        axes.errorbar(steps, shares, yerr=errors, fmt="o-", color=answered, markersize=4, capsize=3, label=label)
        drawn += [*run["reward"]]
        drawn += [share + sign * error for share, error in zip(shares, errors, strict=True) for sign in (-1, 1)]
    margin = 0.05 * (max(drawn) - min(drawn))
    axes.set_ylim(max(min(drawn) - margin, 0), min(max(drawn) + margin, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
