"""Run every command block of the README and the documentation as a reader would, after `make demo`.

A block is bash or Python code between fences, or the commands of a row in a table of tasks and commands. Each page
runs from top to bottom in an empty folder that has what the repository's root has. A comment above a block changes
that: `<!-- not run: REASON -->` leaves it out (at the top of a page: all of the page's), `<!-- file: NAME -->` writes
it to a file for a later block, `<!-- shows: CHECKS -->` checks its output (`shown.py`). Rows with placeholders,
servers and conversations are left out. Models of `make demo` stand in for those of the Hub in the README.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import shown

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/*.md", "configs/README.md")
SHARED = ("README.md", "benchmarks", "configs", "demo-output", "docs", "examples", "scripts")  # of the root
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>not run|file|shows): (?P<words>.*?) -->\n)?```(?P<language>bash|python)\n", re.M
)
TASKS = re.compile(r"^\| task \| command \|.*\n(?:\|.*\n)+", re.M)
TASK = re.compile(r"^\|[^|]*\| (?P<commands>`(?:dlm-bridge|torchrun)(?:\\\||[^|])*)\|", re.M)
PLACEHOLDER, SERVER = re.compile(r"\bMODEL\b|\.\.\."), re.compile(r"^dlm-bridge (?:app|chat|serve) ")
# Checks of the tables' commands, which have no comment.
TASK_CHECKS = {"generate demo-output/llada": "words; end", "generate demo-output/smollm2": "/[Rr]iver.* water/"}
WHOLE_PAGE = re.compile(r"<!-- not run: (.*?) -->\n\n?#")
SECONDS = 600  # for one block
# For models of the Hub in the README's first commands.
STAND_INS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "demo-output/smollm2",
    "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1": "demo-output/llada",
}


@dataclass(frozen=True)
class Block:
    """Code of a page, from a line on."""

    page: str
    line: int
    language: str
    code: str
    mark: str | None
    words: str


def blocks(page: Path) -> Iterator[Block]:
    """The page's blocks, in order."""
    text = page.read_text()
    whole = WHOLE_PAGE.match(text)
    tasks = [row for table in TASKS.finditer(text) for row in TASK.finditer(text, table.start(), table.end())]
    for found in sorted((*FENCE.finditer(text), *tasks), key=re.Match.start):
        if found in tasks:
            begin, language = found.start(), "bash"
            code, mark, words = task(found["commands"])
        else:
            begin, language = found.end(), found["language"]
            code = text[begin : text.index("\n```", begin) + 1]
            mark, words = found["mark"], found["words"] or ""
        for published, model in STAND_INS.items() if page.name == "README.md" else ():
            code = code.replace(published, model)
        if whole:
            mark, words = "not run", whole[1]
        yield Block(str(page.relative_to(ROOT)), text[:begin].count("\n") + 1, language, code, mark, words)


def task(cell: str) -> tuple[str, str | None, str]:
    """The commands in a table's cell, one a line, their mark and its words."""
    spans = [code.replace("\\|", "|") for code in re.findall(r"`([^`]+)`", cell)]
    commands = [code for code in spans if code.startswith(("dlm-bridge ", "torchrun "))]  # others are extras' names
    code = "".join(f"{command}\n" for command in commands)
    if PLACEHOLDER.search(code):
        return code, "not run", "has a placeholder"
    if SERVER.match(code):
        return code, "not run", "runs until it is interrupted"
    for command, checks in TASK_CHECKS.items():
        if command in code:
            return code, "shows", checks
    return code, None, ""


def run(block: Block, folder: Path, environment: dict[str, str]) -> str | None:
    """The block's output where it fails, or shows what it should not; else None."""
    if block.mark == "file":
        (folder / block.words).write_text(block.code)
        return None
    command = ["bash", "-e", "-o", "pipefail"] if block.language == "bash" else [sys.executable, "-"]
    try:
        done = subprocess.run(
            command,
            input=block.code,
            cwd=folder,
            env=environment,
            text=True,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end in {SECONDS} s"
    if done.returncode:
        return f"{done.stdout}\n{done.stderr}"
    problem = shown.problem(block.words, done.stdout, block.code, folder) if block.mark == "shows" else None
    return problem and f"{done.stdout}\n{problem}"


def environment() -> dict[str, str]:
    """Variables for a block's commands, which are those of this Python's environment."""
    passive = {"OMP_WAIT_POLICY": "PASSIVE"}  # as in scripts/demo.py: the machine may have other work
    return {**passive, **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="only these, such as docs/sampling.md")
    parser.add_argument("--list", action="store_true", help="list the blocks that are not run, and why")
    given = parser.parse_args()
    pages = sorted(page for pattern in PAGES for page in ROOT.glob(pattern))
    pages = [page for page in pages if not given.pages or str(page.relative_to(ROOT)) in given.pages]
    if given.list:
        for block in (block for page in pages for block in blocks(page) if block.mark == "not run"):
            print(f"{block.page}:{block.line}: {block.words}")
        return 0
    if not (ROOT / "demo-output").is_dir():
        print("run `make demo` first: the blocks use what it leaves in demo-output")
        return 2
    failed = count = 0
    for page in pages:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for name in SHARED:
                if (ROOT / name).exists():
                    (folder / name).symlink_to(ROOT / name)
            for block in blocks(page):
                if block.mark == "not run":
                    continue
                began = time.monotonic()
                problem = run(block, folder, environment())
                count, failed = count + 1, failed + (problem is not None)
                state = "ok" if problem is None else "FAILED"
                print(f"{state:6} {time.monotonic() - began:6.1f} s  {block.page}:{block.line}", flush=True)
                if problem is not None:
                    print(f"{block.code}\n{problem[-3000:]}", flush=True)
    print(f"{count} blocks run, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
