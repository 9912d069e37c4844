"""What importing the package does and does not do, what it consists of, and the versions it was tested with."""

from __future__ import annotations

import ast
import fnmatch
import json
import pickle
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dlm_bridge import Bridge, registration
from dlm_bridge.cli import env
from dlm_bridge.registration import EXTENSIONS

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import test_matrix as matrix

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page for pattern in ("*.md", "docs/*.md", "model_cards/*.md", "*/**/README.md") for page in ROOT.glob(pattern)
)
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md" and not {"data", ".venv", "build"} & set(page.parts)]
# A checkpoint's manifest, and groups of entry points.
NO_MODULES = {f"dlm_bridge.{name}" for name in ("json", "extensions", "families", "platforms", "samplers")}


def run(code: str, *args: str, cwd: Path | None = None) -> str:
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Runs each code of a JSON list in a process of its own, forked from one that has imported what takes longest and has
# no part in what the codes are about; prints a JSON list of exit codes and what each said.
FORKS = """
import json, os, sys, tempfile, traceback
import huggingface_hub, safetensors.torch, tokenizers, torch

assert not {"dlm_bridge", "transformers"} & set(sys.modules)
told = []
for code in json.loads(sys.argv.pop(1)):
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if child == 0:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            status = 1
            try:
                exec(code, {})
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.seek(0)
        told.append((status, file.read()))
print(json.dumps(told))
"""


def test_import_specs_and_help_load_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "accelerate", "datasets", "megatron", "huggingface_hub"}
    assert not heavy & set(run("import dlm_bridge, sys; print(*sys.modules)").split())
    specs = "from dlm_bridge.models.families import families; import sys; families(); print(*sys.modules)"
    assert not heavy & set(run(specs).split())
    code = (
        "import sys, contextlib, io\n"
        "from dlm_bridge.cli.app import main\n"
        "sys.argv = ['dlm-bridge', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main()\n"
        "print(*sys.modules)"
    )
    assert not heavy & set(run(code).split())


def loaded_by(*commands: tuple[object, ...]) -> list[set[str]]:
    """The modules that are in a process after each of the commands, which it runs one after the other."""
    code = (
        "import sys, contextlib, io, json\n"
        "from dlm_bridge.cli.app import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['dlm-bridge', *words]\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main()\n"
        "    print(*sys.modules)"
    )
    words = [list(map(str, command)) for command in commands]
    return [set(line.split()) for line in run(code, json.dumps(words)).splitlines()]


def test_commands_load_no_more_than_they_need(llada: Path, tmp_path: Path) -> None:
    heavy = {"torch", "transformers", "numpy", "accelerate", "datasets", "megatron", "huggingface_hub", "peft"}
    # torch.distributed.checkpoint, and torch.distributed.tensor under it, take as long to import as torch.
    heavy |= {"torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo", "matplotlib"}
    commands: list[tuple[set[str], tuple[object, ...]]] = [
        (set(), ("families",)),
        (set(), ("plan", llada, "--gpus", 2, "--seq-length", 32)),
        (set(), ("plan", "LLaDA2.0-flash", "--gpus", 8, "--seq-length", 32, "--json")),
        ({"numpy"}, ("inspect", llada)),
        *(
            ({"torch", "numpy"}, words)
            for words in (
                ("import", llada, tmp_path / "m", "--tp", 2),
                ("export", tmp_path / "m", tmp_path / "hub"),
                ("reshard", tmp_path / "m", tmp_path / "m1", "--tp", 1),
                ("verify", tmp_path / "m1"),
                ("verify", llada, tmp_path / "m1"),
            )
        ),
    ]
    found = loaded_by(*(words for _, words in commands))
    for (needed, words), loaded in zip(commands, found, strict=True):
        assert heavy & loaded <= needed, words
    assert (tmp_path / "hub" / "config.json").is_file()


def test_processes_that_a_command_starts_do_not_show_torchs_warning_about_pynvml() -> None:
    code = (
        "import os, subprocess, sys, warnings\n"
        "from dlm_bridge.cli import __main__, app\n"
        "child = 'import warnings; warnings.warn(\"The pynvml package is deprecated. Use\", FutureWarning)'\n"
        "def main():\n"
        "    print(repr(subprocess.run([sys.executable, '-c', child], stderr=subprocess.PIPE).stderr))\n"
        "app.main = main\n"
        "os.environ.pop('PYTHONWARNINGS', None)\n"
        "main()\n"
        "__main__.run()"
    )
    before, within = run(code).splitlines()
    assert "pynvml" in before
    assert within == "b''"


def test_import_and_export_load_little_before_the_first_byte(llada: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from dlm_bridge.convert import streaming\n"
        "from dlm_bridge.cli.app import main\n"
        "def write_at(*_):\n"
        "    print(*sys.modules, flush=True)\n"
        "    os._exit(0)\n"
        "streaming.write_at = write_at\n"
        "main()"
    )
    Bridge.from_hf(llada).to_megatron(tmp_path / "m")
    for words in (("import", llada, tmp_path / "new", "--workers", 1), ("export", tmp_path / "m", tmp_path / "new")):
        loaded = set(run(code, *map(str, words)).split())
        assert "torch" in loaded
        assert not {"transformers", "torch.distributed.checkpoint", "sympy"} & loaded, words


AUTO = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM"
ORDERS = {
    "before": f"import dlm_bridge; {AUTO}",
    "after": f"{AUTO}; import dlm_bridge",
    # The body imports the Auto classes while it is itself being imported.
    "before-body": f"import dlm_bridge; import transformers.models.llama.modeling_llama; {AUTO}",
    "between": f"import transformers; import dlm_bridge; from transformers import LlamaForCausalLM; {AUTO}",
}
LOAD = """
import sys
path = sys.argv[1]
print(type(AutoConfig.from_pretrained(path)).__name__)
print(type(AutoModel.from_pretrained(path)).__name__)
print(type(AutoModelForCausalLM.from_pretrained(path)).__name__)
"""
UNPICKLE = """
import pickle, sys
from transformers import AutoModelForCausalLM
with open(sys.argv[2], 'rb') as file:
    config = pickle.load(file)
print(type(AutoModelForCausalLM.from_config(config)).__name__)
"""
UNTESTED = """
from dlm_bridge import registration
import logging, sys
logging.basicConfig(stream=sys.stdout)
registration.version = {"torch": "1.0", "transformers": "9.9"}.__getitem__
assert "transformers" not in sys.modules
from transformers import AutoConfig
"""


@pytest.fixture(scope="module")
def told(llada: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code of `UNPICKLE` and `UNTESTED`, and what each said, in a process of its own."""
    from transformers import AutoConfig

    import dlm_bridge  # noqa: F401

    pickled = tmp_path_factory.mktemp("pickled") / "config.pickle"
    pickled.write_bytes(pickle.dumps(AutoConfig.from_pretrained(llada)))
    return said_by({"unpickle": UNPICKLE, "untested": UNTESTED}, llada, pickled)


@pytest.fixture(scope="module")
def told_in_order(llada: Path) -> dict[str, tuple[int, str]]:
    """The same of `LOAD` in each of the `ORDERS`."""
    return said_by({name: f"{imports}\n{LOAD}" for name, imports in ORDERS.items()}, llada)


def said_by(codes: dict[str, str], *paths: Path) -> dict[str, tuple[int, str]]:
    found = json.loads(run(FORKS, json.dumps(list(codes.values())), *map(str, paths)))
    return {name: (code, said) for name, (code, said) in zip(codes, found, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_know_the_families_in_either_order(order: str, told_in_order: dict[str, tuple[int, str]]) -> None:
    code, said = told_in_order[order]
    assert code == 0, said
    lines = [line for line in said.splitlines() if line.startswith("LLaDA")]
    assert lines == ["LLaDAConfig", "LLaDAModelLM", "LLaDAModelLM"], said


def test_model_from_an_unpickled_config(told: dict[str, tuple[int, str]]) -> None:
    code, said = told["unpickle"]
    assert code == 0, said
    assert said.splitlines()[-1:] == ["LLaDAModelLM"]  # behind a warning where a version is untested


def test_every_package_is_installed() -> None:
    """cli/ and model_cards/ are installed inside dlm_bridge."""
    code = "import setuptools; from distutils.core import run_setup\n"
    code += "print(*run_setup(sys.argv[1], stop_after='init').packages)"
    installed = set(run("import sys; " + code, str(ROOT / "setup.py"), cwd=ROOT).split())
    found = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "dlm_bridge").rglob("__init__.py")}
    assert installed == found | {"dlm_bridge.cli", "dlm_bridge.model_cards"}


def test_every_data_file_is_installed() -> None:
    """By the patterns in pyproject.toml, from folders that setup.py finds: of another setuptools warns."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    for file in (ROOT / "dlm_bridge").rglob("*"):
        if not file.is_file() or "__pycache__" in file.parts:
            continue
        assert (file.parent / "__init__.py").exists(), f"{file.parent} has no __init__.py"
        if file.suffix != ".py":
            assert any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns), f"{file} is no package data"


def test_every_public_class_name_is_unique() -> None:
    places: dict[str, list[str]] = {}
    for file in sources():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.extension(*EXTENSIONS)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    folders = "dlm_bridge|cli|tests|benchmarks|scripts|configs|docs|model_cards"
    files = set(re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./*-]*\w", text))
    files = {name for name in files if "NAME" not in name}  # of what a reader adds
    assert [name for name in sorted(files) if not list(ROOT.glob(name)) and not list(ROOT.glob(f"{name}.*"))] == []
    names = set(re.findall(r"(?<![\w/.-])dlm_bridge(?:\.\w+)+", text)) - NO_MODULES
    for module, imported in re.findall(r"^\s*from (dlm_bridge[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
        names |= {f"{module}.{name.split(' as ')[0].strip()}" for name in imported.split(",")}
    assert [name for name in sorted(names) if not exists(name)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT / "docs"], ids=lambda page: page.name)
def test_headings_that_a_page_links_to_exist(page: Path) -> None:
    """Of pages that GitHub shows; `mkdocs build --strict` checks those of the site."""
    slugify = pytest.importorskip("markdown.extensions.toc").slugify
    missing = []
    for path, anchor in re.findall(r"\]\(([\w/.-]+\.md)#([\w-]+)\)", page.read_text()):
        linked = (page.parent / path).read_text()
        headings = {
            slugify(re.sub(r"[`*]|\[|\]\(.*?\)", "", heading), "-")
            for heading in re.findall(r"^#+ (.*)$", linked, re.MULTILINE)
        }
        if anchor not in headings:
            missing.append(f"{path}#{anchor}")
    assert missing == []


def sources() -> list[Path]:
    return sorted([*(ROOT / "dlm_bridge").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something at the top of one, without importing it."""
    parts = name.removeprefix("dlm_bridge.cli").removeprefix("dlm_bridge").strip(".").split(".")
    place = ROOT / "cli" if name.startswith("dlm_bridge.cli") else ROOT / "dlm_bridge"
    while parts and parts != [""]:
        part = parts.pop(0)
        if (place / part).is_dir():
            place = place / part
        elif (place / f"{part}.py").exists():
            place = place / f"{part}.py"
        else:
            file = place if place.suffix == ".py" else place / "__init__.py"
            return part in defined(file)
    return True


def defined(file: Path) -> set[str]:
    """The names that a module defines, imports or loads lazily, by strings."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Name(id=name)
                | ast.Constant(value=str(name))
            ):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name)
    return names


def test_untested_versions_are_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    installed = {"torch": "2.99.1+cpu", "transformers": "5.24.4", "transformer-engine": "2.3"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError
        return installed[name]

    monkeypatch.setattr(registration, "version", version)
    registration.warn_if_untested.cache_clear()
    for _ in range(2):
        for name in registration.TESTED:
            registration.warn_if_untested(name)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "torch 2.99.1+cpu is untested",
        "transformer-engine 2.3 is untested",
    ]
    assert env.environment()["untested"] == [record.getMessage() for record in caplog.records]
    del installed["transformer-engine"]
    assert registration.untested("transformer-engine") is None
    registration.warn_if_untested.cache_clear()
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    registration.warn_if_untested("torch")
    assert not caplog.records


def test_untested_versions_are_named_when_the_families_are_registered(told: dict[str, tuple[int, str]]) -> None:
    code, said = told["untested"]
    assert code == 0, said
    assert "torch 1.0 is untested" in said
    assert "transformers 9.9 is untested" in said


# ------------------------------------------------------------------------------------------------- the matrix


def test_the_cells_of_the_matrix_replace_three_versions() -> None:
    cell = matrix.CELLS["py3.12-core0.19-torch2.11-transformersnewest"]
    requirements = cell.requirements()
    assert {"torch==2.11.*", "transformers", "megatron-core==0.19.*"} <= set(requirements)
    assert len(requirements) == len({re.split(r"[^\w.-]", text)[0] for text in requirements})
    assert any(text.startswith("trl>=") for text in requirements)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kept = [name for name in project["dependencies"] if not name.startswith(("torch>", "transformers>"))]
    assert set(kept) < set(requirements)
    assert len(kept) == len(project["dependencies"]) - 2
    assert all((ROOT / name).exists() for name in matrix.SUITE)


def test_the_cells_have_what_the_extra_takes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [Requirement(text) for text in project["optional-dependencies"]["megatron"]]
    allowed = {cell.core for cell in matrix.CELLS.values()}
    for cell in matrix.CELLS.values():
        (core,) = (
            one.specifier
            for one in extra
            if one.name == "megatron-core" and one.marker.evaluate({"python_version": cell.python})
        )
        assert core.contains(cell.core)
        assert not any(core.contains(version) for version in ("0.17.1", "0.18.2", "0.20.0"))
        assert core.contains("0.16.1")
        assert core.contains("0.19.2") == (cell.python != "3.11")
    assert allowed == {"0.16.1", "0.19"}


def test_the_weekly_job_runs_every_cell() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "matrix.yml").read_text())["jobs"]["cell"]
    axes = job["strategy"]["matrix"]
    cells = [
        {"core": core, "torch": torch, "transformers": transformers}
        for core in axes["core"]
        for torch in axes["torch"]
        for transformers in axes["transformers"]
    ]
    cells += [more for more in axes["include"] if "torch" in more]
    names = {"{core}-torch{torch}-transformers{transformers}".format_map(cell) for cell in cells}
    assert names == set(matrix.CELLS)
    pythons = {more["core"]: more["python"] for more in axes["include"]}
    assert all(f"py{pythons[cell['core']]}-" in cell["core"] for cell in cells)


def test_what_was_tested_is_in_the_matrix_and_in_the_requirements() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, cells in (("torch", matrix.TORCHES), ("transformers", matrix.TRANSFORMERS)):
        oldest, newest = registration.TESTED[name]
        assert newest in cells
        (bounds,) = [text for text in requirements if re.match(rf"{name}\b", text)]
        assert SpecifierSet(bounds.removeprefix(name)).contains(newest)
        assert Version(oldest) <= Version(re.search(r">=([\d.]+)", bounds)[1])
