"""Build the source distribution and install it in a fresh environment of each interpreter: what a release runs.

    python scripts/check_package.py python3.11 python3.12 python3.13
    python scripts/check_package.py python3.12 --package dist/dlm_bridge-0.1.0-py3-none-any.whl   one that is built

Each environment gets the package with its requirements, and then, outside the checkout, has to import the package,
list the families, convert a tiny checkpoint both ways and compare the two. With --light it gets no torch: the commands
that need none are run. Exit code 1 names the interpreters that failed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("dlm_bridge", "cli", "model_cards")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
LIGHT = ("typer>=0.16", "rich>=14", "pyyaml>=6", "xxhash>=3.5", "zlib-ng>=0.5")
CONFIG = (
    '{"architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": 32, "n_heads": 2, "n_kv_heads": 2, '
    '"n_layers": 2, "mlp_hidden_size": 48, "vocab_size": 64, "embedding_size": 64, "mask_token_id": 63}'
)
MAKE = """
import json, sys
from pathlib import Path
from safetensors.torch import save_file
from dlm_bridge.models.families import families
spec = next(spec for spec in families() if spec.name == "llada")
tensors = dict(spec.initial_weights(json.loads(Path("hub/config.json").read_text()), seed=0))
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, "hub/model.safetensors")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="+", help="interpreters, by name or path")
    parser.add_argument("--light", action="store_true", help="without torch and what else is large")
    parser.add_argument("--package", type=Path, help="a wheel or source distribution, instead of building one")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="dlm-bridge-package-") as name:
        folder = Path(name)
        package = options.package.resolve() if options.package else _build(folder)
        for number, python in enumerate(options.python):
            print(f"{python}: {package.name} in a fresh environment", flush=True)
            try:
                _check(python, package, folder / str(number), options.light)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{python}: {error}", file=sys.stderr)
                failed.append(python)
    print("failed: " + ", ".join(failed) if failed else "the package works under all of them")
    return 1 if failed else 0


def _build(folder: Path) -> Path:
    """The source distribution, built of a copy, so that no build folder stays in the checkout."""
    copy = folder / "checkout"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copyfile(ROOT / name, copy / name)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=copy, check=True, stdout=subprocess.DEVNULL)
    (package,) = folder.glob("*.tar.gz")
    return package


def _check(python: str, package: Path, place: Path, light: bool) -> None:
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    bin = place / "bin"
    pip = [str(bin / "python"), "-m", "pip", "install", "--quiet"]
    if light:
        subprocess.run([*pip, *LIGHT], check=True)
    subprocess.run([*pip, *(["--no-deps"] if light else []), str(package)], check=True)
    hub = place / "work" / "hub"
    hub.mkdir(parents=True)
    (hub / "config.json").write_text(CONFIG)
    command = str(bin / "dlm-bridge")
    steps = [[command, "--version"], [command, "families", "--json"], [str(bin / "python"), "-c", "import dlm_bridge"]]
    if not light:
        steps += [
            [str(bin / "python"), "-c", MAKE],
            [command, "inspect", "hub"],
            [command, "import", "hub", "megatron", "--tp", "2"],
            [command, "export", "megatron", "back"],
            [command, "verify", "hub", "back"],
        ]
    for step in steps:
        subprocess.run(step, cwd=hub.parent, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
