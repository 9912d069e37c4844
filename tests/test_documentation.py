"""The documentation's links and code blocks, without running them: `make docs` builds the site, `make check-docs` runs
the blocks."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import check_docs
import shown

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)\s]*)?\)")
PAGES = sorted(
    page for pattern in ("*.md", "docs/*.md", "configs/*.md", "model_cards/*.md") for page in ROOT.glob(pattern)
)
BLOCKS = [block for pattern in check_docs.PAGES for page in ROOT.glob(pattern) for block in check_docs.blocks(page)]
# Of the site, which scripts/docs_hooks.py generates or takes from elsewhere.
GENERATED = ("reference/cli.md", "reference/configuration.md", "families/", "recipes.md", "contributing.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = set(LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)))
    if page.parent.name == "docs":
        links = {link for link in links if not link.startswith(GENERATED)}
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []


def test_lint_fails_at_a_dead_link(tmp_path: Path) -> None:
    """By the command that builds the site there."""
    pytest.importorskip("mkdocs")
    recipe = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    (command,) = re.findall(r"^\t\$\(MKDOCS\) (.*)$", recipe, re.MULTILINE)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[dead](nowhere.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: test\nvalidation: {links: {not_found: warn}}\n")
    words = [sys.executable, "-m", "mkdocs", *shlex.split(command)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "nowhere.md" in done.stderr


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language == "python" and block.mark in (None, "shows")],
    ids=lambda block: f"{block.page}:{block.line}",
)
def test_a_python_block_defines_what_it_uses(block: check_docs.Block) -> None:
    """Each is a program of its own."""
    words = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--quiet", "-"]
    done = subprocess.run(words, input=block.code, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


def test_tables_of_tasks_are_run_but_for_placeholders_and_servers() -> None:
    tasks = {
        block.code.strip(): block.words
        for block in BLOCKS
        if block.page in ("README.md", "docs/tasks.md") and block.code.startswith(("dlm-bridge ", "torchrun "))
    }
    assert tasks["dlm-bridge verify demo-output/llada hub\ndlm-bridge verify ckpt --logits"] == ""
    assert tasks["dlm-bridge convert-to-dlm demo-output/smollm2 smollm2-dlm --mask-token '<|mask|>'"] == ""
    assert tasks["dlm-bridge serve demo-output/llada --port 8000"]
    assert tasks["dlm-bridge chat demo-output/smollm2"]
    assert all("MODEL" in code or "..." in code for code, words in tasks.items() if "placeholder" in words)


def test_what_a_block_shows_is_checked() -> None:
    """Of a block that prints a text of the demo's model."""
    samples = re.compile(
        r"demo-output/llada.*\bgenerate\(.*print\(|^dlm-bridge generate demo-output/llada .*", re.S | re.M
    )
    sampled = [block for block in BLOCKS if samples.search(block.code)]
    assert len(sampled) >= 6
    unchecked = [f"{block.page}:{block.line}" for block in sampled if block.mark is None]
    assert [
        place for place in unchecked if not place.startswith("docs/getting_started.md")
    ] == []  # the README's, in one block


def test_checks_find_what_is_wrong(tmp_path: Path) -> None:
    for block in BLOCKS:
        if block.mark == "shows":
            assert shown.names(block.words)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("".join(f'{{"reward": {n / 20}}}\n' for n in range(20)))
    for checks, good, bad in (
        ("words", "Tom was a sailor.", "Tom was a carererel."),
        ("words; end", "Tom was a sailor.\n", "Tom was a"),
        ("/sail.r/", "a sailor", "a painter"),
    ):
        assert shown.problem(checks, good, "", tmp_path) is None
        assert shown.problem(checks, bad, "", tmp_path)
        assert shown.problem(checks, "", "", tmp_path)
    assert shown.problem("reward rises by 0.8 in run", "", "", tmp_path) is None
    assert shown.problem("reward rises by 0.95 in run", "", "", tmp_path)
    assert shown.problem("reward falls by 0.1 in run", "", "", tmp_path)
    with pytest.raises(ValueError, match="wrods"):
        shown.names("wrods")


def test_blocks_for_many_gpus_are_marked() -> None:
    too_many = [
        f"{block.page}:{block.line}"
        for block in BLOCKS
        if block.mark in (None, "shows")
        and any(int(n) > 4 for n in re.findall(r"--nproc-per-node[ =](\d+)", block.code))
    ]
    assert too_many == []
