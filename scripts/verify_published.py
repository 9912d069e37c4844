"""Compare the smallest published checkpoint of each family with its original code, and write the table of results.

    python scripts/verify_published.py --trust-remote-code --output docs/published.md

Runs `dlm-bridge verify --against-original` on each, one after another: it downloads the checkpoint, makes an
environment with the versions that its card names, and runs its code there, as you. A virtual environment is no
sandbox. Both models are held in fp32: 4 bytes a parameter, in memory, twice. A family whose comparison fails is a row
with the reason, and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dlm_bridge.models.families import families

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
HEADER = """# Published checkpoints against their original code

What `scripts/verify_published.py` found: each checkpoint as this package loads it, compared with the code that its
`auto_map` names, in fp32 on one machine.

| family | checkpoint | original | tensors | largest difference of logits (allowed) | greedy sample | result |
|---|---|---|---|---|---|---|
"""


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 where every checkpoint equals its original, 1 where one does not, 2 without consent."""
    options = _parse(arguments)
    chosen = {**SMALLEST, **dict(pair.split("=", 1) for pair in options.checkpoint)}
    names = options.family or list(chosen)
    if unknown := [name for name in names if name not in chosen]:
        print(f"verify_published.py: {unknown[0]}: its checkpoints have no code of their own", file=sys.stderr)
        return 2
    rows, equal = [], True
    for name in names:
        verdict = _verify(chosen[name], options)
        if verdict.pop("refused", False):
            print(verdict["error"], file=sys.stderr)
            return 2
        rows.append(_row(name, chosen[name], verdict))
        equal = equal and verdict.get("equal", False)
        print(rows[-1], flush=True)
    if options.output is not None:
        options.output.write_text(HEADER + "\n".join(rows) + "\n")
    return 0 if equal else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=[spec.name for spec in families()], help="only this one")
    parser.add_argument(
        "--checkpoint", action="append", default=[], metavar="FAMILY=PLACE", help="another checkpoint of a family"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="agree that the checkpoints' code runs")
    parser.add_argument("--original-python", metavar="PATH", help="an interpreter for all of them")
    parser.add_argument("--output", type=Path, help="the Markdown page to write")
    return parser.parse_args(arguments)


def _verify(place: str, options: argparse.Namespace) -> dict[str, Any]:
    """The verdict's fields; `error` where there is none."""
    command = [sys.executable, "-m", "dlm_bridge.cli", "verify", place, "--against-original", "--json"]
    command += ["--trust-remote-code"] if options.trust_remote_code else []
    command += ["--original-python", options.original_python] if options.original_python else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode in (0, 1) and done.stdout:
        verdict: dict[str, Any] = json.loads(done.stdout)
        return verdict
    error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"error": error, "refused": not options.trust_remote_code}


def _row(family: str, place: str, verdict: dict[str, Any]) -> str:
    if "error" in verdict:
        cells = [family, f"`{place}`", "-", "-", "-", "-", f"not compared: {verdict['error']}"]
    else:
        found = verdict["differences"]
        sample = "differs" if any(each["name"] == "greedy sample" for each in found) else "equal"
        logits = verdict["logits"]
        result = "equal" if verdict["equal"] else f"{len(found)} differences, first {found[0]['name']}"
        cells = [
            family,
            f"`{place}`",
            verdict["b"],
            str(verdict["tensors"]),
            f"{logits['difference']:.1e} ({logits['allowed']:.1e})",
            sample,
            result,
        ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
