"""The examples run as written, on tiny models in the place of the demo's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints import write_llada, write_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
SPECIAL = {"eos_token": "<eos>", "pad_token": "<eos>", "mask_token": "<mask>"}
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
EOS, MASK = 258, 259

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples and what they read of demo-output."""
    root = tmp_path_factory.mktemp("examples")
    ids = {"mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS}
    write_tokenizer(write_llada(root / "demo-output/llada", vocab_size=272, embedding_size=272, **ids), TOKENIZER)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(root / "demo-output/smollm2")
    write_tokenizer(root / "demo-output/smollm2", {**TOKENIZER, "mask_token": None})
    shutil.copytree(EXAMPLES, root / "examples")
    return root


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_script(script: Path, root: Path) -> None:
    done = subprocess.run([sys.executable, script], cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_notebooks(root: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbmake", "--nbmake-timeout=300"]
    done = subprocess.run(
        [*command, *sorted(root.glob("examples/*.ipynb"))],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert f"{len(list(EXAMPLES.glob('*.ipynb')))} passed" in done.stdout


def test_custom_family(root: Path) -> None:
    """The package's entry point, read from its project file, leads to a family that loads."""
    import tomllib

    package = root / "examples/custom_family"
    entry = tomllib.loads((package / "pyproject.toml").read_text())["project"]["entry-points"]["dlm_bridge.families"]
    module, name = entry["acme"].split(":")
    code = (
        f"from {module} import {name} as spec; import torch\n"
        "sizes = dict(vocab_size=100, hidden_size=16, intermediate_size=24, num_hidden_layers=1)\n"
        "config = spec.load('config_class')(**sizes, num_attention_heads=2, num_key_value_heads=2)\n"
        "model = spec.load('model_class')(config)\n"
        "print(model.generate(torch.tensor([[1, 2]]), gen_length=8, block_length=8, steps=4).shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=package, capture_output=True, text=True, timeout=300, check=False
    )
    assert "torch.Size([1, 10])" in done.stdout, done.stderr
