"""What importing the package does and does not do. Each case needs a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str, *args: str, cwd: Path | None = None) -> str:
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


@pytest.mark.parametrize(
    "imports",
    [
        "import dlm_bridge; from transformers import AutoConfig, AutoModel, AutoModelForCausalLM",
        "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM; import dlm_bridge",
        # The body imports the Auto classes while it is itself being imported.
        "import dlm_bridge; import transformers.models.llama.modeling_llama;"
        "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM",
        "import transformers; import dlm_bridge; from transformers import LlamaForCausalLM;"
        "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM",
    ],
    ids=["before", "after", "before-body", "between"],
)
def test_auto_classes_know_the_families_in_either_order(imports: str, llada: Path) -> None:
    code = f"""{imports}
import sys, logging
path = sys.argv[1]
print(type(AutoConfig.from_pretrained(path)).__name__)
print(type(AutoModel.from_pretrained(path)).__name__)
print(type(AutoModelForCausalLM.from_pretrained(path)).__name__)
"""
    assert run(code, str(llada)).split() == ["LLaDAConfig", "LLaDAModelLM", "LLaDAModelLM"]


def test_model_from_an_unpickled_config(llada: Path) -> None:
    code = """
import pickle, subprocess, sys
if len(sys.argv) == 3:
    from transformers import AutoModelForCausalLM
    with open(sys.argv[2], 'rb') as file:
        config = pickle.load(file)
    print(type(AutoModelForCausalLM.from_config(config)).__name__)
else:
    import dlm_bridge
    from transformers import AutoConfig
    print(pickle.dumps(AutoConfig.from_pretrained(sys.argv[1])).hex())
"""
    pickled = bytes.fromhex(run(code, str(llada)).strip())
    file = llada.parent / "config.pickle"
    file.write_bytes(pickled)
    assert run(code, str(llada), str(file)).split() == ["LLaDAModelLM"]


def test_every_package_is_installed() -> None:
    """cli/ and model_cards/ are installed inside dlm_bridge."""
    root = Path(__file__).parents[1]
    code = "import setuptools; from distutils.core import run_setup\n"
    code += "print(*run_setup(sys.argv[1], stop_after='init').packages)"
    installed = set(run("import sys; " + code, str(root / "setup.py"), cwd=root).split())
    found = {".".join(init.parent.relative_to(root).parts) for init in (root / "dlm_bridge").rglob("__init__.py")}
    assert installed == found | {"dlm_bridge.cli", "dlm_bridge.model_cards"}
