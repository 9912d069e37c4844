"""Repeat published results: published checkpoints against their original code, and against their authors' scores.

    python scripts/reproduce.py --trust-remote-code --confirm-run-unsafe-code --output reproduced

Two parts: `dlm-bridge verify --against-original` on the smallest checkpoint of each family that has code of its own,
and one benchmark of each of ten checkpoints whose authors state examples, lengths and steps. After every row OUTPUT
has report.json (scores, differences, digests of weights and code, versions, machine) and report.md (tables). A row
that is there is not repeated. Checkpoints and data come from the Hub.

The original code runs as you, in an environment with the versions that its card names: a virtual environment is no
sandbox. Verification holds both models in fp32: 4 bytes a parameter, twice. Benchmarks of code execute what the models
write: use a container without a network. Exit code 1 if a checkpoint differs from its original code, a published score
is outside the 95% interval of ours, or a row failed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

import dlm_bridge

# The families whose checkpoints carry code of their own (auto_map), with the smallest of each.
SMALLEST = {
    "coda": "Salesforce/CoDA-v0-Instruct",
    "dream": "Dream-org/Dream-v0-Instruct-7B",
    "dream_reasoner": "Dream-org/DreamReasoner-8B",
    "dreamon": "Dream-org/DreamOn-v0-7B",
    "fast_dllm_v2": "Efficient-Large-Model/Fast_dLLM_v2_1.5B",
    "idlm": "yifanyu/I-DLM-8B",
    "illada": "GSAI-ML/iLLaDA-8B-Base",
    "llada": "GSAI-ML/LLaDA-8B-Base",
    "llada2_moe": "inclusionAI/LLaDA2.0-mini",
    "llada_moe": "inclusionAI/LLaDA-MoE-7B-A1B-Base",
    "nemotron_labs_diffusion": "nvidia/Nemotron-Labs-Diffusion-3B",
    "rnd1": "radicalnumerics/RND1-Base-0910",
    "sdar": "JetLM/SDAR-1.7B-Chat",
    "sdar_moe": "JetLM/SDAR-30B-A3B-Chat",
    "stable_diffcoder": "ByteDance-Seed/Stable-DiffCoder-8B-Base",
    "wedlm": "tencent/WeDLM-7B-Base",
}


@dataclass(frozen=True)
class Score:
    """A published score and the protocol that gave it.

    Args:
        name: of the row.
        checkpoint: Hub id.
        task: of lm-evaluation-harness, or a YAML file.
        metric: of the task, in its results.
        published: in percent.
        settings: of the sampler.
        shots: examples in the prompt.
        source: where the authors state score and protocol.
        differs: what we do otherwise.
    """

    name: str
    checkpoint: str
    task: str
    metric: str
    published: float
    settings: dict[str, Any]
    shots: int
    source: str
    chat: bool = True
    differs: str = ""


LLADA = "ML-GSAI/LLaDA, EVAL.md"
DREAM = "DreamLM/Dream, eval and eval_instruct"
DLLM = "ZHZisZZ/dllm, examples/a2d"
OPENCOMPASS = "their four examples are OpenCompass's, ours lm-evaluation-harness's"
FLEXIBLE = "exact_match,flexible-extract"
PASS = "pass@1,create_test"
BOXED = str(Path(__file__).parent / "reproduce_tasks" / "gsm8k_boxed.yaml")
PROMPT = 2048  # tokens of a prompt with its examples, at most
ENTROPY = {"alg": "entropy", "alg_temp": 0.0}


PAGE = """# Published checkpoints, repeated

{versions}.

## Against the original code

In fp32, on one machine: each checkpoint as this package loads it, and the code that its `auto_map` names.

| family | checkpoint | original | tensors | largest difference of logits (allowed) | greedy sample | result |
|---|---|---|---|---|---|---|
{originals}

## Against published scores

| row | checkpoint | task, examples | documents | published | ours, 95% interval | result | other than the authors |
|---|---|---|---|---|---|---|---|
{scores}
"""


def _blocks(length: int, block: int, **more: Any) -> dict[str, Any]:
    return {"gen_length": length, "steps": length, "block_length": block, **more}


SCORES = (
    Score(
        "a2d-mdlm", "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "gsm8k_cot", FLEXIBLE, 29.3, _blocks(256, 256), 5, DLLM
    ),
    Score(
        "a2d-bd3lm",
        "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1",
        "gsm8k_cot",
        FLEXIBLE,
        46.3,
        {"algorithm": "bd3lm", **_blocks(256, 32)},
        0,
        DLLM,
    ),
    Score(
        "a2d-coder-mdlm",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
        "humaneval_instruct",
        PASS,
        28.1,
        _blocks(256, 256),
        0,
        DLLM,
    ),
    Score(
        "a2d-coder-bd3lm",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1",
        "humaneval_instruct",
        PASS,
        39.0,
        {"algorithm": "bd3lm", **_blocks(256, 32)},
        0,
        DLLM,
    ),
    Score(
        "sdar-1.7b",
        "JetLM/SDAR-1.7B-Chat",
        BOXED,
        "exact_match,boxed",
        80.1,
        {
            "gen_length": 4096,
            "block_length": 4,
            "steps": 4,
            "temperature": 0.0,
            "remasking_strategy": "low_confidence_static",
        },
        0,
        "JetAstra/SDAR, README and evaluation/opencompass/configs/eval_sdar_hf.py",
        differs="bf16 instead of fp16; answers compared as numbers, not by OpenCompass's parser",
    ),
    Score(
        "dream-base",
        "Dream-org/Dream-v0-Base-7B",
        "gsm8k_cot",
        FLEXIBLE,
        77.2,
        {"gen_length": 256, "steps": 256, "temperature": 0.0, "top_p": 0.95, **ENTROPY},
        8,
        DREAM,
        chat=False,
    ),
    Score(
        "dream-instruct",
        "Dream-org/Dream-v0-Instruct-7B",
        "gsm8k_cot",
        FLEXIBLE,
        81.0,
        {"gen_length": 256, "steps": 256, "temperature": 0.1, "top_p": 0.9, **ENTROPY},
        0,
        DREAM,
    ),
    Score("llada-base", "GSAI-ML/LLaDA-8B-Base", "gsm8k", FLEXIBLE, 70.0, _blocks(256, 256), 5, LLADA, chat=False),
    Score(
        "llada-instruct",
        "GSAI-ML/LLaDA-8B-Instruct",
        "gsm8k_cot",
        FLEXIBLE,
        78.9,
        _blocks(256, 8),
        4,
        LLADA,
        differs=OPENCOMPASS,
    ),
    Score(
        "llada-1.5",
        "GSAI-ML/LLaDA-1.5",
        "gsm8k_cot",
        FLEXIBLE,
        83.6,
        _blocks(256, 16, confidence_eos_eot_inf=True),
        4,
        LLADA,
        differs=OPENCOMPASS,
    ),
)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 where everything agrees, 1 where something does not, 2 without consent or for an unknown row."""
    options = _parse(arguments)
    places = dict(pair.split("=", 1) for pair in options.checkpoint)
    verified = {name: places.get(name, SMALLEST[name]) for name in SMALLEST}
    scores = {score.name: score for score in SCORES}
    chosen = options.only or [
        *(verified if "verify" in options.part else ()),
        *(scores if "score" in options.part else ()),
    ]
    if unknown := [name for name in chosen if name not in verified and name not in scores]:
        print(f"reproduce.py: --only {unknown[0]}: the rows are {', '.join([*verified, *scores])}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    report = _read(options.output / "report.json") or {"machine": machine(), "verified": {}, "scores": {}}
    for name in chosen:
        if name in verified and "verify" in options.part and name not in report["verified"]:
            row = _verify(verified[name], options)
            if row.pop("refused", False):
                print(row["error"], file=sys.stderr)
                return 2
            _add(report, "verified", name, {"checkpoint": verified[name], **row}, options.output)
        if name in scores and "score" in options.part and name not in report["scores"]:
            place = places.get(name, scores[name].checkpoint)
            row = _measure(scores[name], place, options)
            _add(report, "scores", name, {"checkpoint": place, **row}, options.output)
    rows = [*report["verified"].values(), *report["scores"].values()]
    return 0 if all(row.get("agrees") for row in rows) else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the report")
    parser.add_argument("--only", action="append", metavar="ROW", help="a family or the name of a score; repeatable")
    parser.add_argument("--part", action="append", choices=["verify", "score"], help="only this part (default: both)")
    parser.add_argument(
        "--checkpoint", action="append", default=[], metavar="ROW=PLACE", help="another checkpoint for a row"
    )
    parser.add_argument("--task", action="append", default=[], metavar="TASK=FILE", help="another task for a task")
    parser.add_argument("--limit", type=int, help="documents per benchmark (default: all)")
    parser.add_argument("--batch-size", default="auto", help="of the benchmarks")
    parser.add_argument("--trust-remote-code", action="store_true", help="agree that the checkpoints' code runs")
    parser.add_argument("--original-python", metavar="PATH", help="an interpreter for all checkpoints' code")
    parser.add_argument(
        "--confirm-run-unsafe-code", action="store_true", help="agree that code which models write runs"
    )
    options = parser.parse_args(arguments)
    options.part = options.part or ["verify", "score"]
    return options


def machine() -> dict[str, Any]:
    """What the figures were measured with: this package's version and the digest of its code, packages, device."""
    root = Path(dlm_bridge.__file__).parent
    code = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        code.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "dlm_bridge": dlm_bridge.__version__,
        "code_sha256": code.hexdigest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "devices": devices or [platform.machine()],
    }


@functools.cache
def digest(place: str) -> dict[str, str]:
    """SHA-256 of each file of weights of a folder, or of a Hub id that has been downloaded; computed once, since rows
    and parts share checkpoints of many GB."""
    folder = Path(place) if Path(place).is_dir() else Path(snapshot_download(place, local_files_only=True))
    found = {}
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with file.open("rb") as stream:
            found[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def _verify(place: str, options: argparse.Namespace) -> dict[str, Any]:
    """The verdict of `verify --against-original`; `error` where there is none."""
    command = ["verify", place, "--against-original", "--json"]
    command += ["--trust-remote-code"] if options.trust_remote_code else []
    command += ["--original-python", options.original_python] if options.original_python else []
    done = _run(command)
    if done.returncode in (0, 1) and done.stdout:
        verdict: dict[str, Any] = json.loads(done.stdout)
        return {"agrees": verdict["equal"], "weights": digest(place), **verdict}
    return {"error": _last_line(done), "refused": not options.trust_remote_code}


def _measure(score: Score, place: str, options: argparse.Namespace) -> dict[str, Any]:
    """Our score under the published protocol, in percent, with the half width of its 95% interval; `error` if the
    evaluation failed."""
    if score.metric == PASS and not options.confirm_run_unsafe_code:
        return {"error": "not run without --confirm-run-unsafe-code"}
    task = dict(pair.split("=", 1) for pair in options.task).get(score.task, score.task)
    folder = options.output / score.name
    command = ["eval", place, "--tasks", task, "--shots", str(score.shots), "--output", str(folder)]
    command += ["--resume" if (folder / "results.json.partial").exists() else "--overwrite"]
    command += ["--batch-size", options.batch_size, "--max-length", str(PROMPT + score.settings["gen_length"])]
    command += ["--chat"] if score.chat else []
    command += ["--limit", str(options.limit)] if options.limit else []
    command += ["--confirm-run-unsafe-code"] if score.metric == PASS else []
    command += [word for name, value in score.settings.items() for word in ("--set", f"{name}={value}")]
    done = _run(command)
    if done.returncode:
        return {"error": _last_line(done)}
    results = _read(folder / "results.json")
    (found,) = results["tasks"].values()
    metrics = found["metrics"]
    name, _, chosen = score.metric.partition(",")
    ours, half = 100 * metrics[score.metric], 196 * metrics[f"{name}_stderr,{chosen}"]
    return {
        "agrees": abs(ours - score.published) <= half,
        "task": Path(task).stem,
        "shots": found["shots"],
        "documents": found["documents"]["effective"],
        "settings": score.settings,
        "ours": ours,
        "half_interval": half,
        "published": score.published,
        "source": score.source,
        "differs": score.differs,
        "weights": digest(place),
        "versions": results["versions"],
    }


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dlm_bridge.cli", *command], capture_output=True, text=True, check=False
    )


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def _add(report: dict[str, Any], part: str, name: str, row: dict[str, Any], output: Path) -> None:
    """Add a row, print it and write the report. A row that failed is in the tables, and is tried again next time."""
    report[part][name] = row
    print((_verified_row if part == "verified" else _score_row)(name, row), flush=True)
    (output / "report.md").write_text(page(report))
    kept = {
        part: {key: each for key, each in report[part].items() if "error" not in each}
        for part in ("verified", "scores")
    }
    (output / "report.json").write_text(json.dumps({**report, **kept}, indent=2) + "\n")


def page(report: dict[str, Any]) -> str:
    """The tables of a report, in Markdown."""
    measured = report["machine"]
    originals = [_verified_row(name, row) for name, row in report["verified"].items()]
    scores = [_score_row(name, row) for name, row in report["scores"].items()]
    versions = f"dlm-bridge {measured['dlm_bridge']}, torch {measured['torch']}, {', '.join(measured['devices'])}"
    return PAGE.format(versions=versions, originals="\n".join(originals), scores="\n".join(scores))


def _verified_row(family: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return _row(family, f"`{row['checkpoint']}`", "-", "-", "-", "-", f"not compared: {row['error']}")
    found = row["differences"]
    sample = "differs" if any(each["name"] == "greedy sample" for each in found) else "equal"
    logits = row["logits"]
    result = "equal" if row["equal"] else f"{len(found)} differences, first {found[0]['name']}"
    allowed = f"{logits['difference']:.1e} ({logits['allowed']:.1e})"
    return _row(family, f"`{row['checkpoint']}`", row["b"], str(row["tensors"]), allowed, sample, result)


def _score_row(name: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return _row(name, f"`{row['checkpoint']}`", "-", "-", "-", "-", f"not measured: {row['error']}", "-")
    ours = f"{row['ours']:.1f} ± {row['half_interval']:.1f}"
    result = "agrees" if row["agrees"] else "differs"
    task = f"{row['task']}, {row['shots']}"
    return _row(
        name,
        f"`{row['checkpoint']}`",
        task,
        str(row["documents"]),
        f"{row['published']:.1f}",
        ours,
        result,
        row["differs"],
    )


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
