"""The package installed from its wheel, or editable, in an environment of its own: `dlm_bridge.cli` runs from every
folder, also from a checkout's root, whose `dlm_bridge/` comes before the installed one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "0")
FOLDERS, FILES = ("dlm_bridge", "cli", "model_cards"), ("pyproject.toml", "setup.py", "README.md", "LICENSE")
CARDS = (
    "from importlib import resources; import dlm_bridge.cli.app as app; "
    "assert (resources.files('dlm_bridge.model_cards') / 'llada.md').is_file(); print(app.__file__)"
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built of, with its links, so that no build folder stays in this one."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request: pytest.FixtureRequest, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the package, which finds what else it needs in this process's own."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder / "environment")
    interpreter = folder / "environment" / "bin" / "python"
    packages = next((folder / "environment" / "lib").glob("python*/site-packages"))
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    if request.param == "wheel":  # of the source distribution, so that both are whole
        run(sys.executable, "-c", BUILD, str(folder), cwd=checkout)
        what = [str(file) for file in folder.glob("*.tar.gz")]
    else:
        what = ["--editable", str(checkout)]
    pip = (sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-deps")
    run(*pip, "--no-build-isolation", *what, cwd=folder)
    return interpreter


@pytest.mark.slow
def test_the_command_line_runs_from_every_folder(python: Path, checkout: Path, tmp_path: Path) -> None:
    for folder in (checkout, tmp_path):
        for launcher in ((), TORCHRUN):
            said = run(str(python), *launcher, "-m", "dlm_bridge.cli", "--version", cwd=folder)
            assert said.startswith("dlm-bridge "), (folder, launcher)
    assert run(str(python.parent / "dlm-bridge"), "--version", cwd=checkout).startswith("dlm-bridge ")


@pytest.mark.slow
def test_each_folder_has_one_copy_with_its_model_cards(python: Path, checkout: Path, tmp_path: Path) -> None:
    """In the checkout its own, elsewhere the installed one, also beside an unrelated folder called cli."""
    editable = "editable" in str(python)
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "app.py").write_text("raise RuntimeError('not this one')")
    assert Path(run(str(python), "-c", CARDS, cwd=checkout).strip()).resolve() == checkout / "cli" / "app.py"
    elsewhere = Path(run(str(python), "-c", CARDS, cwd=tmp_path).strip()).resolve()
    assert elsewhere.is_relative_to(checkout if editable else python.parents[1])


def test_the_image_has_what_the_package_is_built_of() -> None:
    """And of its extras and constraints there is none that the project does not have."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    assert copied == {*FOLDERS, *FILES, "constraints.txt"}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == copied
    (extras,) = (line.partition("=")[2].split(",") for line in lines if line.startswith("ARG EXTRAS="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])


def run(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    process = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert process.returncode == 0, process.stdout
    return process.stdout
