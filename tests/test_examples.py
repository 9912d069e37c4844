"""The examples run as written, on the demo's own model, and show words that exist and texts that end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import dlm_bridge  # noqa: F401  registers the families
from dlm_bridge.convert.to_dlm import convert_to_dlm
from tests.checkpoints import write_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import check_docs
import demo
import shown

EXAMPLES = Path(__file__).parents[1] / "examples"
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
EOS = 258
# Checks of the last line that each script prints.
SCRIPTS = {
    "custom_sampler": "words; end",
    "tiny_diffusion_gemma": "/random/",
    "trainer": "/Mia was a .*lived/; words; end",
    "trl_sft": "/Tom had 7 apples\\. He gave Ida one\\./; words; end",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples and what they read of demo-output: what `make demo` trains, and in SmolLM2's place,
    which is not downloaded, a tiny model with random weights."""
    root = tmp_path_factory.mktemp("examples")
    (root / "demo-output").mkdir()
    demo.train_diffusion_model(Console(quiet=True), root / "demo-output")
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
    done = subprocess.run([sys.executable, script], cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    text = done.stdout.strip().splitlines()[-1]
    assert shown.problem(SCRIPTS[script.stem], text, script.read_text(), root) is None, text


@pytest.mark.parametrize(
    "settings",
    [
        {"block_length": 8},
        {"block_length": 128},
        {"block_length": 32, "temperature": 0.5, "seed": 1},
        {"block_length": 16, "temperature": 1.0, "seed": 3},
        {"block_length": 16, "steps": 32},
    ],
    ids=str,
)
def test_the_demo_s_texts(settings: dict[str, Any], root: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(root / "demo-output/llada", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(root / "demo-output/llada")
    prompts = ["Tom was a", "Mia was a clever painter", "On Monday it was"]
    inputs = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, gen_length=128, **{"steps": 128, **settings})
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    assert [shown.unknown_words(text) for text in texts] == [[], [], []], texts
    assert sum(tokenizer.eos_token_id in row for row in output.tolist()) >= 2, texts  # one may be longer


@pytest.mark.parametrize("page", ["README.md", "docs/rl.md", "docs/sampling.md"])
def test_the_first_block_that_shows_something(page: str, root: Path) -> None:
    """The rest is run by `make check-docs`."""
    found = next(block for block in check_docs.blocks(check_docs.ROOT / page) if block.mark == "shows")
    assert check_docs.run(found, root, check_docs.environment()) is None


def test_notebooks(root: Path) -> None:
    drafts = root / "demo-output/smollm2-drafts"  # without the adapter, which is for the real SmolLM2
    convert_to_dlm(root / "demo-output/smollm2", drafts, to="idlm", mask_token="<mask>")
    (drafts / "chat_template.jinja").write_text("{{ messages[0].content }}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--nbmake",
        "--nbmake-timeout=300",
        "--overwrite",
    ]
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
    texts = printed(root / "examples/sample_and_watch.ipynb")
    assert shown.problem("words; end", texts[0], "", root) is None, texts
    assert shown.ends(texts[-1]), texts
    printed_lines = "".join(printed(root / "examples/adapt.ipynb")).splitlines()
    causal, untrained, adapted = (line for line in printed_lines if line.startswith("Tom was"))
    for text in (causal, adapted):
        assert shown.problem("words; end", text, "", root) is None, text
    assert untrained not in (causal, adapted)
    assert printed_lines[-1].endswith("tokens per forward pass")


def printed(notebook: Path) -> list[str]:
    """Texts on stdout of each cell that printed something."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return ["".join(output["text"]) for output in outputs if output.get("name") == "stdout"]


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
