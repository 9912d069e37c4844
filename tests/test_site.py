"""The documentation's site: what scripts/docs_hooks.py generates, and a build that a browser searches from disk."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dlm_bridge.registration import EXTENSIONS

pytest.importorskip("mkdocs")
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import check_docs
import docs_hooks

ROOT = Path(__file__).parents[1]


class Loader(yaml.SafeLoader):
    """Without the tags that name Python objects."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def test_a_page_s_title_is_its_entry_in_the_navigation() -> None:
    def entries(nav: list) -> list[tuple[str, str]]:
        found = []
        for entry in nav:
            ((name, what),) = entry.items()
            found += entries(what) if isinstance(what, list) else [(name, what)]
        return found

    nav = entries(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    texts = {place: (ROOT / source).read_text() for source, place in docs_hooks.SHOWN.items()}
    readme = (ROOT / "README.md").read_text()
    texts["coming_from.md"] = docs_hooks.section(readme, "Coming from other tools")
    texts["reference/cli.md"] = docs_hooks.command_line()
    texts["reference/configuration.md"] = docs_hooks.configuration()
    texts["families/index.md"] = docs_hooks.families()
    for name, place in nav:
        if place == "index.md":  # the landing page
            continue
        text = texts[place] if place in texts else (ROOT / "docs" / place).read_text()
        assert re.search(r"^# (.*)$", text, re.MULTILINE)[1] == name, place


def test_code_in_tables_has_its_own_characters() -> None:
    html = docs_hooks.on_page_content("<td><code>'&lt;\\|mask\\|&gt;'</code></td><p><code>a\\|b</code></p>")
    assert html == "<td><code>'&lt;|mask|&gt;'</code></td><p><code>a\\|b</code></p>"


def test_commands_are_wrapped_and_stay_the_same() -> None:
    blocks = [
        block for pattern in check_docs.PAGES for page in ROOT.glob(pattern) for block in check_docs.blocks(page)
    ]
    long = [block.code for block in blocks if block.language == "bash" and re.search(r".{89}", block.code)]
    assert len(long) > 10
    for code in long:
        wrapped = docs_hooks.wrapped(f"```bash\n{code}```").removeprefix("```bash\n").removesuffix("```")
        commands = [sorted(shlex.split(line, comments=True)) for line in joined(code)]
        assert [sorted(shlex.split(line, comments=True)) for line in joined(wrapped)] == commands
        for line in wrapped.splitlines():
            if docs_hooks.COMMAND.match(line) and shlex_words(line) > 2:
                assert len(line) <= docs_hooks.WIDTH, line


def joined(code: str) -> list[str]:
    """The commands of a block, without comments and continuation lines."""
    lines = code.replace("\\\n", " ").splitlines()
    return [line for line in lines if shlex_words(line)]


def shlex_words(line: str) -> int:
    try:
        return len(shlex.split(line.removesuffix("\\"), comments=True))
    except ValueError:
        return 0


@pytest.mark.extension(*EXTENSIONS)
def test_the_command_line_is_listed_in_the_order_of_the_tasks_with_short_anchors() -> None:
    page = docs_hooks.command_line()
    anchors = re.findall(r"^## dlm-bridge .* \{ #([\w-]+) \}$", page, re.MULTILINE)
    assert anchors == re.findall(r"^\| \[`.*`\]\(#([\w-]+)\)", page, re.MULTILINE)
    code = "".join(block.code for block in check_docs.blocks(ROOT / "README.md"))
    tasks = [
        name for name in dict.fromkeys(re.findall(r"^dlm-bridge ([\w-]+)", code, re.MULTILINE)) if name in anchors
    ]
    assert len(tasks) >= 9
    assert anchors[: len(tasks)] == tasks
    assert {"adapter-import", "plan", "rl"} <= set(anchors)


def test_the_header_links_to_the_repository_once_its_address_is_known() -> None:
    assert docs_hooks.repository('[project]\nname = "a"\n') is None
    known = '[project]\nname = "a"\n[project.urls]\nRepository = "https://host/a/b"\n'
    assert docs_hooks.repository(known) == "https://host/a/b"


@pytest.mark.slow
def test_search_works_from_a_folder_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    with playwright.sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        outside: list[str] = []
        page.on("request", lambda request: outside.append(request.url) if "://" in request.url else None)
        page.goto((tmp_path / "tasks.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("reshard")
        page.wait_for_selector(".md-search-result__link", timeout=60_000)
        found = page.locator(".md-search-result__link").first.get_attribute("href")
        assert str(found).endswith("reference/cli.html?h=reshard")
        assert [url for url in outside if not url.startswith("file://")] == []
        browser.close()
