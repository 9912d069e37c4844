r"""Which diffusion form an autoregressive model is best adapted to: every form at one budget, by successive halving.

    git clone https://github.com/openai/grade-school-math
    python benchmarks/adaptation_forms.py --model smollm2 --data grade-school-math/grade_school_math/data \
        --output forms

--model is SmolLM2-135M-Instruct as a Hub folder (scripts/demo.py writes one). Each part converts it to a form
(`dlm-bridge convert-to-dlm`), trains it on GSM8K (`dlm-bridge sft`) and measures it. The autoregressive twin, trained
on the same rows, is the reference. Settings are chosen on --problems training problems that no run is trained on; the
test problems are for the finalists.

    round 1  every form at the first learning rate, for the first number of --epochs
    round 2  the best block size of the --keep best kinds of form and the twin, at the other --lrs, for the second
    round 3  the --finalists best kinds and the twin at their best learning rate, for the third; with the test problems
    infilling  a line of a solution is hidden. The bidirectional form fills it in, given its number of tokens; the twin
               writes it after a prompt with what comes before and after it, and was trained on such prompts for as
               many steps

A line for each sampler setting, as soon as it is known: right answers (by the number after ####) with Wilson's 95%
interval, those by the last number of the text, tokens before the end of the text per forward pass of the row (all
passes counted), the fraction of texts that ended, seconds of training and sampling. Finalists' lines on the test
problems also have the ratio of their accuracy to the twin's, with a paired bootstrap interval. Seconds are those of
a GPU that --jobs parts share.

In --output, parts has a JSON file for each finished part, forms.jsonl all lines. What is there is not done again; a
training that --seconds or a signal ended goes on from its checkpoint. All visible GPUs are used
(CUDA_VISIBLE_DEVICES), each by --jobs parts at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gsm8k import CALCULATOR, last_number, ratio_interval, stated_number, wilson

ROOT = Path(__file__).resolve().parents[1]
THRESHOLDS = (0.95, 0.85, 0.7)
RECIPE = {
    "lr-schedule": "cosine", "min-lr": 0, "weight-decay": 0, "beta1": 0.9, "beta2": 0.999, "clip-grad": 1,
    "keep-last": 1, "eval-batches": 8,
}  # fmt: skip
SAVING = 30.0  # seconds before the end at which trainings are told to save
INFILLING = ("infilling_bidirectional", "infilling_twin")
REQUEST = "{question}\n\nA solution with a missing line:\n{before}\n[...]\n{after}\n\nWrite the missing line."

Line = dict[str, Any]


def _thresholds(values: Iterable[float], **settings: Any) -> dict[str, dict[str, Any]]:
    return {f"threshold {value}": {**settings, "threshold": value} for value in values}


@dataclass(frozen=True)
class Form:
    """A form with its block size. `kind`: value of --to; `micro_batch`: rows of a forward pass on a GPU."""

    kind: str
    block: int | None = None
    micro_batch: int = 32
    flags: tuple[str, ...] = ()
    settings: Mapping[str, dict[str, Any]] = field(default_factory=lambda: {"greedy": {}})

    @property
    def masked(self) -> bool:
        return self.kind in ("bidirectional", "shifted")


MASKED = {
    "a token a pass": {"algorithm": "llada", "block_length": 32},
    **_thresholds((0.85,), algorithm="llada", block_length=32),
}
HYBRID = {**_thresholds(THRESHOLDS), "linear_spec": {"algorithm": "linear_spec"}}
FORMS: dict[str, Form] = {
    "twin": Form("twin", micro_batch=64),
    "block-causal-shifted-4": Form("block-causal-shifted", 4, 16, settings=_thresholds(THRESHOLDS)),
    "block-causal-shifted-32": Form("block-causal-shifted", 32, 16, settings=_thresholds(THRESHOLDS)),
    "bidirectional": Form("bidirectional", micro_batch=64, settings=MASKED),
    "shifted": Form("shifted", micro_batch=64, settings=MASKED),
    **{
        f"block-causal-{size}": Form("block-causal", size, settings=_thresholds(THRESHOLDS))
        for size in (4, 8, 16, 32)
    },
    "block-causal-growing": Form(
        "block-causal", 16, flags=("--block-schedule", "0:4,{third}:8,{two_thirds}:16"),
        settings=_thresholds(THRESHOLDS),
    ),
    **{
        f"several-blocks-{size}": Form(
            "block-causal", size, flags=("--objective", "multi_bd"),
            settings={
                **_thresholds(THRESHOLDS, algorithm="multi_bd", buffer_size=4),
                "one block, threshold 0.85": {"threshold": 0.85},
            },
        )
        for size in (4, 8)
    },
    "idlm-4": Form("idlm", 3, flags=("--auto-balance",)),
    **{f"nemotron-{size}": Form("nemotron", size, settings=HYBRID) for size in (8, 16)},
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A training and its measurement. The name says everything: FORM_LR_EPOCHS, with _test FORM_LR_EPOCHS_test."""

    form: str
    lr: float
    epochs: int
    test: bool = False

    @property
    def name(self) -> str:
        return f"{self.form}_{self.lr:g}_{self.epochs}" + "_test" * self.test

    @classmethod
    def of(cls, name: str) -> Part:
        form, lr, epochs, *test = name.split("_")
        return cls(form, float(lr), int(epochs), bool(test))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hub folder of the autoregressive model")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--part", help="run one part, such as block-causal-4_0.0003_3, or infilling_twin")
    parser.add_argument("--seconds", type=float, default=math.inf, help="save and end before this time")
    parser.add_argument("--jobs", type=int, default=2, help="parts at a time on each GPU (%(default)s)")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--lrs", nargs="+", type=float, default=[3e-4, 1e-4, 6e-4])
    parser.add_argument("--epochs", nargs=3, type=int, default=[3, 3, 10], help="of each round (%(default)s)")
    parser.add_argument("--keep", type=int, default=4, help="kinds of form in round 2 (%(default)s)")
    parser.add_argument("--finalists", type=int, default=2, help="kinds of form in round 3 (%(default)s)")
    parser.add_argument("--infilling-epochs", type=int, default=5, help="0: no infilling (%(default)s)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=320, help="longer problems are left out (%(default)s)")
    parser.add_argument("--problems", type=int, default=500, help="training problems held out (%(default)s)")
    parser.add_argument("--test-problems", type=int, help="default: all")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--together", type=int, default=256, help="texts that are sampled together (%(default)s)")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # the job file of a measuring process
    options = parser.parse_args()
    if options.measure is not None:
        measure(json.loads(options.measure.read_text()))
        return 0
    bench = Bench(options)
    if options.part is not None:
        bench.run([options.part if options.part in INFILLING else Part.of(options.part)])
        return 0
    first, second, third = options.epochs
    lrs = options.lrs
    bench.run(Part(form, lrs[0], first) for form in options.forms)
    kept = bench.best(options.keep, [Part(form, lrs[0], first) for form in options.forms])
    tried = [Part(part.form, lr, second) for part in kept for lr in lrs]
    bench.run(tried)
    chosen = bench.best(options.finalists, tried)
    bench.run(Part(part.form, part.lr, third, test=True) for part in chosen)
    bench.compare(chosen, third)
    if options.infilling_epochs:
        bench.run(INFILLING)
    print("stopped: call again to go on" if bench.stopped else "done", flush=True)
    return 0


class Bench:
    """The parts of one --output."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.output
        self.parts, self.rows = self.folder / "parts", self.folder / "rows"
        self.ends = time.monotonic() + options.seconds
        self.stopped = False
        self.gpus = visible_gpus()
        self.processes: set[tuple[subprocess.Popen[str], bool]] = set()
        self.lock = threading.Lock()
        self.converting = {name: threading.Lock() for name in FORMS}
        for folder in (self.parts, self.rows, self.folder / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        self.counts = self._rows()

    # ---- Parts and rounds.

    def run(self, parts: Iterable[Part | str]) -> None:
        """Run parts that are not finished, on all GPUs. After `stop`, nothing."""
        waiting = [part for part in parts if not self.file(part).exists()]
        places = [gpu for _ in range(self.options.jobs) for gpu in self.gpus or [None]]
        errors: list[str] = []

        def work(gpu: str | None) -> None:
            while not self.stopped:
                with self.lock:
                    if not waiting:
                        return
                    part = waiting.pop(0)
                try:
                    self.infilling(part, gpu) if isinstance(part, str) else self.finish(part, gpu)
                except FailedError as error:
                    if not self.stopped:
                        errors.append(str(error))
                        print(error, flush=True)

        threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in places]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            left = self.ends - time.monotonic()
            if left < SAVING and not self.stopped:
                self.stop()
            if left < SAVING / 6:
                self.stop(signal.SIGKILL)
        if errors and not self.stopped:
            print(f"{len(errors)} parts failed: they are left out; see {self.folder}/logs", flush=True)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Let trainings save and end; end measurements, whose lines are kept."""
        self.stopped = True
        for process, trains in list(self.processes):
            if process.poll() is None:
                process.send_signal(number if trains else signal.SIGKILL)

    def file(self, part: Part | str) -> Path:
        return self.parts / f"{part if isinstance(part, str) else part.name}.json"

    def found(self, part: Part) -> dict[str, Any] | None:
        file = self.file(part)
        return json.loads(file.read_text()) if file.exists() else None

    def best(self, count: int, parts: list[Part]) -> list[Part]:
        """The best part of the best `count` kinds of form, and of the twin. Most right answers, then most tokens a
        pass, at a part's best setting."""
        scores: dict[str, tuple[float, float, Part]] = {}
        for part in parts:
            found = self.found(part)
            if found is None:  # failed
                continue
            best = max(found["lines"], key=lambda line: (line["right"], line["tokens_per_pass"]))
            score = (best["right"], best["tokens_per_pass"], part)
            kind = FORMS[part.form].kind
            if kind not in scores or score[:2] > scores[kind][:2]:
                scores[kind] = score
        kinds = sorted((kind for kind in scores if kind != "twin"), key=lambda kind: scores[kind][:2], reverse=True)
        return [scores[kind][2] for kind in [*kinds[:count], *(["twin"] if "twin" in scores else [])]]

    # ---- One part.

    def finish(self, part: Part, gpu: str | None) -> None:
        """Convert, train and measure."""
        form, run = FORMS[part.form], self.folder / "runs" / part.name
        model = self.options.model if form.kind == "twin" else self.converted(part.form, form, gpu)
        steps = self.steps(part.epochs)
        flags = [word.format(third=steps // 3, two_thirds=2 * steps // 3) for word in form.flags]
        training = self.train(
            part.name, model, run, steps, part.lr, form.micro_batch, self.rows / "train.jsonl", gpu, flags,
            self.rows / "held.jsonl",
        )  # fmt: skip
        facts = {"part": part.name, "form": part.form, "block": form.block, "lr": part.lr, "epochs": part.epochs}
        job = {
            "model": str(newest(run)), "texts": "answers", "facts": {**facts, **training},
            "sets": ["held", "test"] if part.test else ["held"],
            "settings": dict(form.settings), "twin": form.kind == "twin",
        }  # fmt: skip
        lines = self.measured(part.name, job, gpu)
        held = [line for line in lines if line["problems"] == "held"]
        self.keep(part, {"training": training, "lines": held, "test": [line for line in lines if line not in held]})
        if not part.test:
            shutil.rmtree(run)

    def infilling(self, name: str, gpu: str | None) -> None:
        """Train and measure one side of the infilling of a hidden line."""
        twin = name == "infilling_twin"
        form, run = FORMS["twin" if twin else "bidirectional"], self.folder / "runs" / name
        model = self.options.model if twin else self.converted("bidirectional", form, gpu)
        rows = self.rows / ("hidden_train.jsonl" if twin else "train.jsonl")
        steps = self.steps(self.options.infilling_epochs)
        training = self.train(name, model, run, steps, self.options.lrs[0], form.micro_batch, rows, gpu, [], None)
        settings = {"greedy": {}} if twin else {"a token a pass": {"algorithm": "llada", "infill": True}}
        facts = {"part": name, "form": form.kind, "lr": self.options.lrs[0], **training}
        job = {
            "model": str(newest(run)), "texts": "lines", "facts": facts, "sets": ["hidden_held"],
            "settings": settings, "twin": twin,
        }  # fmt: skip
        self.keep(name, {"training": training, "lines": self.measured(name, job, gpu)})
        shutil.rmtree(run)

    def keep(self, part: Part | str, found: dict[str, Any]) -> None:
        write(self.file(part), json.dumps(found))
        with self.lock:
            all_lines = []
            for file in sorted(self.parts.glob("*.json"), key=lambda file: file.stat().st_mtime):
                one = json.loads(file.read_text())
                all_lines += [without_bits(line) for line in (*one["lines"], *one.get("test", ()))]
            write(self.folder / "forms.jsonl", "".join(json.dumps(line) + "\n" for line in all_lines))

    def steps(self, epochs: int) -> int:
        return max(3, round(epochs * self.counts["train"] / self.options.batch))

    def converted(self, name: str, form: Form, gpu: str | None) -> Path:
        folder = self.folder / "models" / name
        with self.converting[name]:
            if not (folder / "config.json").exists():
                words = ["convert-to-dlm", self.options.model, folder, "--to", form.kind, "--overwrite"]
                words += [] if form.block is None else ["--block-size", form.block]
                self.call(f"convert_{name}", command(*words), gpu)
        return folder

    def train(
        self, name: str, model: Path, run: Path, steps: int, lr: float, micro_batch: int, rows: Path, gpu: str | None,
        flags: list[str], held: Path | None,
    ) -> dict[str, Any]:  # fmt: skip
        """`dlm-bridge sft`. Returns its seconds, tokens/s, peak memory and held-out loss."""
        batch, finished = self.options.batch, f"step-{steps:07d}"
        options: dict[str, Any] = RECIPE | {
            "steps": steps, "lr": lr, "warmup-steps": steps // 10, "seq-length": self.options.seq_length,
            "global-batch-size": batch, "micro-batch-size": math.gcd(batch, micro_batch),
            "precision": "bf16" if self.gpus else "fp32", "save-interval": 0,
            "eval-interval": steps if held else 0,
        }  # fmt: skip
        words: list[Any] = [word for key, value in options.items() for word in (f"--{key}", value)]
        words += ["--valid-data", held] if held else ["--split", "100,0,0"]
        if not (run / "checkpoints" / finished).exists():
            saved = any((run / "checkpoints").glob("step-*"))
            if run.exists() and not saved:  # killed before it saved
                shutil.rmtree(run)
            words = ["sft", "--model", model, "--data", rows, "--output", run, *words, *flags]
            self.call(name, command(*words, *["--resume"] * saved), gpu, trains=True)
            if not (run / "checkpoints" / finished).exists():
                raise FailedError(f"{name}: stopped before its last step")
        seconds, before, metrics = 0.0, 0, {}
        for metrics in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            seconds += (metrics["tokens"] - before) / metrics["tokens_per_s"]
            before = metrics["tokens"]
        print(f"{name}: {steps} steps in {seconds:.0f} s", flush=True)
        peak = round((metrics.get("peak_memory") or 0) / 2**30, 1)
        loss = metrics.get("eval_loss")
        return {"steps": steps, "train_s": round(seconds, 1), "peak_gib": peak, "held_out_loss": loss}

    def measured(self, name: str, job: dict[str, Any], gpu: str | None) -> list[Line]:
        """The lines of a part, each of which is kept as soon as it is known."""
        lines, file = self.folder / "lines" / f"{name}.jsonl", self.folder / "jobs" / f"{name}.json"
        for folder in (lines.parent, file.parent):
            folder.mkdir(exist_ok=True)
        job |= {"rows": str(self.rows), "lines": str(lines), "new_tokens": self.options.new_tokens}
        job |= {"together": self.options.together, "jobs": self.options.jobs}
        write(file, json.dumps(job))
        places = ("--model", "--data", "--output")
        words = [str(word) for place in places for word in (place, getattr(self.options, place[2:]))]
        script = [sys.executable, str(Path(__file__).resolve())]
        self.call(f"{name}_measure", [*script, *words, "--measure", str(file)], gpu, shown=True)
        return [json.loads(line) for line in lines.read_text().splitlines()]

    def call(self, name: str, words: list[str], gpu: str | None, trains: bool = False, shown: bool = False) -> None:
        """Run a process to its end. Raises FailedError."""
        if self.stopped:
            raise FailedError(f"{name}: stopped")
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str((self.folder / "inductor").absolute())}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        log = self.folder / "logs" / f"{name}.txt"
        with log.open("a") as output:
            pipe = subprocess.PIPE if shown else output
            process = subprocess.Popen(words, env=environment, stdout=pipe, stderr=output, text=True)
            self.processes.add((process, trains))
            if self.stopped:
                self.stop()
            if shown:
                assert process.stdout is not None
                for line in process.stdout:
                    print(line, end="", flush=True)
            process.wait()
            self.processes.discard((process, trains))
        if process.returncode:
            raise FailedError(f"{name} failed: {log.read_text()[-1500:]}")

    # ---- Rows and comparison.

    def _rows(self) -> dict[str, int]:
        """Write train.jsonl, held.jsonl and test.jsonl of conversations, and the rows with a hidden line."""
        counts = self.rows / "counts.json"
        if counts.exists():
            return dict(json.loads(counts.read_text()))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.options.model)
        drawn, limit = random.Random(0), self.options.seq_length
        problems = read_lines(self.options.data / "train.jsonl")
        drawn.shuffle(problems)
        size = self.options.problems
        sets = {
            "held": problems[:size],
            "train": problems[size:],
            "test": read_lines(self.options.data / "test.jsonl")[: self.options.test_problems],
        }
        found = {}
        for name, rows in sets.items():
            said = [conversation(row["question"], CALCULATOR.sub("", row["answer"])) for row in rows]
            if name != "test":  # all test problems are measured
                said = [row for row in said if fits(tokenizer, row, limit)]
            found[name] = len(said)
            write(self.rows / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in said))
            if name != "test":
                copies = self.options.infilling_epochs if name == "train" else 1
                hidden = [one for _ in range(copies) for row in said for one in hide(row, drawn)]
                if name == "train":
                    hidden = [row for row in hidden if fits(tokenizer, row, limit)]
                found[f"hidden_{name}"] = len(hidden)
                write(self.rows / f"hidden_{name}.jsonl", "".join(json.dumps(row) + "\n" for row in hidden))
        write(counts, json.dumps(found))
        print(f"rows: {found}", flush=True)
        return found

    def compare(self, chosen: list[Part], epochs: int) -> None:
        """Ratios of the finalists' accuracy to the twin's on the same test problems."""
        found = {part.form: self.found(Part(part.form, part.lr, epochs, test=True)) for part in chosen}
        twin = found.pop("twin", None)
        if twin is None or self.stopped:
            return
        reference, ratios = bits(twin["test"][0]["bits"]), []
        for form, one in found.items():
            for line in (one or {"test": []})["test"]:
                ratio, low, high = ratio_interval(bits(line["bits"]), reference) or (None, None, None)
                words = {"form": form, "setting": line["setting"], "ratio_to_twin": ratio, "low": low, "high": high}
                print(json.dumps(words), flush=True)
                ratios.append(json.dumps(words) + "\n")
        write(self.folder / "forms_ratios.jsonl", "".join(ratios))


class FailedError(Exception):
    """A process of a part failed or was stopped."""


# ---- Measurement, in a process of its own.


def measure(job: dict[str, Any]) -> None:
    """Sample all texts of each set with each setting. A line for each, appended to the job's file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import dlm_bridge  # noqa: F401

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    lines = Path(job["lines"])
    done = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    known = {(line["problems"], line["setting"]) for line in done}
    on_gpu = torch.cuda.is_available()
    model: Any = None
    for problems in job["sets"]:
        for setting, given in job["settings"].items():
            if (problems, setting) in known:
                continue
            if model is None:
                dtype = torch.bfloat16 if on_gpu else torch.float32
                model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
                model = model.to("cuda" if on_gpu else "cpu").eval()
                tokenizer = AutoTokenizer.from_pretrained(job["model"])
            rows = read_lines(Path(job["rows"]) / f"{problems}.jsonl")
            texts = answers if job["texts"] == "answers" else hidden_lines
            began = time.perf_counter()
            facts = texts(model, tokenizer, rows, given, job)
            facts["sampling_s"] = round(time.perf_counter() - began, 1)
            device = torch.cuda.get_device_name() if on_gpu else "cpu"
            line = {**job["facts"], "problems": problems, "setting": setting, **facts, "device": device}
            line["jobs"] = job["jobs"]
            with lines.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(without_bits(line)), flush=True)


def answers(model: Any, tokenizer: Any, rows: list[Line], given: Line, job: Line) -> Line:
    """Greedy answers to problems."""
    asked = [row["messages"][:1] for row in rows]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in asked]
    found = sample(model, tokenizer, prompts, {"gen_length": job["new_tokens"], **given}, job)
    ends = end_tokens(model, tokenizer)
    right, last, tokens, passes, ended = [], 0, 0, 0, 0
    for row, one in zip(rows, found, strict=True):
        ended += one.tokens[-1] in ends
        kept = [token for token in one.tokens if token not in ends]
        text, wanted = tokenizer.decode(kept, skip_special_tokens=True), row["messages"][1]["content"]
        right.append(stated_number(text) is not None and stated_number(text) == stated_number(wanted))
        last += last_number(text) is not None and last_number(text) == last_number(wanted)
        tokens, passes = tokens + len(kept), passes + one.forwards
    low, high = wilson(sum(right), len(right))
    return {
        "right": sum(right), "of": len(right), "low": low, "high": high, "last_number_right": last,
        # Transformers' `generate` counts the passes of the whole batch; a token of a row takes one.
        "tokens_per_pass": 1.0 if job["twin"] else round(tokens / max(passes, 1), 3),
        "tokens": tokens, "ended": round(ended / len(rows), 3), "bits": "".join(str(int(one)) for one in right),
    }  # fmt: skip


def hidden_lines(model: Any, tokenizer: Any, rows: list[Line], given: Line, job: Line) -> Line:
    """Hidden lines of solutions: the diffusion model fills in their tokens, the twin writes them."""
    from dlm_bridge.generation.request import MASK

    if job["twin"]:
        asked = [row["messages"][:1] for row in rows]
        prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in asked]
        found = sample(model, tokenizer, prompts, {"gen_length": 96, **given}, job)
        new, ends = [one.tokens for one in found], end_tokens(model, tokenizer)
        new = [[token for token in tokens if token not in ends] for tokens in new]
    else:
        prompts = [masked_line(tokenizer, row, MASK) for row in rows]
        found = sample(model, tokenizer, prompts, given, job)
        new = [
            [token for token, asked in zip(one.tokens, prompt, strict=True) if asked == MASK]
            for one, prompt in zip(found, prompts, strict=True)
        ]
    written = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in new]
    wanted = [row["messages"][1]["content"].strip() for row in rows]
    exact = sum(one == other for one, other in zip(written, wanted, strict=True))
    numbers = [last_number(one) == last_number(other) for one, other in zip(written, wanted, strict=True)]
    low, high = wilson(sum(numbers), len(rows))
    exact_low, exact_high = wilson(exact, len(rows))
    return {
        "right": sum(numbers), "of": len(rows), "low": low, "high": high, "exact": exact, "exact_low": exact_low,
        "exact_high": exact_high, "tokens_per_pass": 1.0 if job["twin"] else
        round(sum(map(len, new)) / max(sum(one.forwards for one in found), 1), 3),
    }  # fmt: skip


def sample(model: Any, tokenizer: Any, prompts: list[list[int]], given: Line, job: Line) -> list[Any]:
    """The end event of each prompt, as `dlm-bridge generate --jsonl` has them."""
    from dlm_bridge.generation.offline import PromptSampler

    sampler = PromptSampler(model, tokenizer, prompts, {"temperature": 0.0, **given}, job["together"])
    return sorted(sampler, key=lambda event: event.name)


def masked_line(tokenizer: Any, row: Line, mask: int) -> list[int]:
    """Tokens of the whole conversation, with masks in place of the hidden line."""
    text = tokenizer.apply_chat_template(row["whole"], tokenize=False)
    begin = text.rindex(row["whole"][1]["content"]) + row["begin"]
    end = begin + len(row["messages"][1]["content"])
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [mask if begin <= first < end else token for token, (first, _) in pairs]


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    stored = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *([stored] if isinstance(stored, int) else stored or [])}


# ---- Rows, numbers, statistics.


def conversation(question: str, answer: str) -> Line:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def hide(row: Line, drawn: random.Random) -> list[Line]:
    """A row that asks for a line between the first and the last of a solution; none if there is none."""
    question, answer = (message["content"] for message in row["messages"])
    parts = answer.split("\n")
    if len(parts) < 3:
        return []
    at = drawn.randrange(1, len(parts) - 1)
    before, after = "\n".join(parts[:at]), "\n".join(parts[at + 1 :])
    asked = REQUEST.format(question=question, before=before, after=after)
    begin = len(before) + 1
    return [{**conversation(asked, parts[at]), "whole": row["messages"], "begin": begin}] if parts[at].strip() else []


def fits(tokenizer: Any, row: Line, limit: int) -> bool:
    return len(tokenizer.apply_chat_template(row["messages"], return_dict=False)) <= limit


def bits(text: str) -> list[int]:
    return [int(bit) for bit in text]


def without_bits(line: Line) -> Line:
    return {key: value for key, value in line.items() if key != "bits"}


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def command(*words: Any) -> list[str]:
    return [sys.executable, "-m", "dlm_bridge.cli", *map(str, words)]


def read_lines(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write(file: Path, text: str) -> None:
    """Write a file at once: a call that is killed leaves the old one."""
    unfinished = file.with_suffix(f".{threading.get_ident()}.partial")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def visible_gpus() -> list[str]:
    """Values of CUDA_VISIBLE_DEVICES for one GPU each."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        return []
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


if __name__ == "__main__":
    sys.exit(main())
