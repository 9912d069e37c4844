"""A family of another package: installed with pip into a folder, found by its entry point, loaded in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import standard_tensors, write_hub_folder

FILES = {
    "pyproject.toml": """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "acme-dlm"
version = "1.0"

[tool.setuptools]
packages = ["acme_dlm"]

[project.entry-points."dlm_bridge.objectives"]
acme_masked = "acme_dlm.objective:AcmeMasked"
masked = "acme_dlm.objective:AcmeMasked"

[project.entry-points."dlm_bridge.samplers"]
acme_order = "acme_dlm.sampler:AcmeOrder"
taken = "acme_dlm.sampler:Taken"
absent = "acme_dlm.absent:Sampler"

[project.entry-points."dlm_bridge.families"]
acme = "acme_dlm.acme:SPEC"
taken = "acme_dlm.taken:SPEC"
absent = "acme_dlm.absent:SPEC"
""",
    "acme_dlm/__init__.py": "",
    "acme_dlm/acme.py": '''
"""Acme: spec and mapping."""

from dlm_bridge.models.decoder_mapping import dense_mapping
from dlm_bridge.models.families import FamilySpec

SPEC = FamilySpec(
    name="acme",
    title="Acme",
    hub_ids=(),
    architectures=("AcmeLM",),
    model_type="acme",
    config_class="acme_dlm.modeling_acme:AcmeConfig",
    model_class="acme_dlm.modeling_acme:AcmeLM",
    mapping=dense_mapping({"num_key_value_heads": 32}, frozenset({"qkv_bias"})),
    mask_token_id=99,
    sampler={"algorithm": "llada"},
)
''',
    "acme_dlm/modeling_acme.py": '''
"""Acme: config and model."""

from transformers import Qwen2Config, Qwen2ForCausalLM

from acme_dlm.acme import SPEC
from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig


class AcmeConfig(HubConfig, Qwen2Config):
    model_type = "acme"
    family = SPEC
    is_causal = False

    mask_token_id: int | None = 99


class AcmeLM(DiffusionLM, Qwen2ForCausalLM):
    config_class = AcmeConfig
    family = SPEC
''',
    "acme_dlm/objective.py": '''
"""Masked diffusion for Acme, with half the weight."""

from dataclasses import dataclass
from typing import ClassVar

from dlm_bridge.objectives.single_stream import MaskedDiffusion


@dataclass(frozen=True)
class AcmeMasked(MaskedDiffusion):
    families: ClassVar[tuple[str, ...]] = ("acme",)

    def loss_sum(self, logits_MV, noisy):
        return super().loss_sum(logits_MV, noisy) / 2
''',
    "acme_dlm/sampler.py": '''
"""Acme's sampler, from right to left."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.generation import BlockLayout, CommitRule, Sampler, SamplerSpec, parameter


class RightToLeft(CommitRule):
    def begin(self, masks, noise):
        return [[1] * count for count in masks]

    def select(self, step):
        return step.masked & (step.masked.flip(1).cumsum(1).flip(1) == 1)


@dataclass(frozen=True, kw_only=True)
class AcmeOrder(Sampler):
    name: ClassVar[str] = "acme_order"
    attention_patterns: ClassVar[tuple[str, ...]] = ("bidirectional",)
    acme_width: int = parameter(8, minimum=1)

    def spec(self, tokens):
        return SamplerSpec(BlockLayout(self.acme_width), RightToLeft(), self.sampling())


@dataclass(frozen=True, kw_only=True)
class Taken(AcmeOrder):
    name: ClassVar[str] = "llada"
''',
    "acme_dlm/taken.py": """
from dataclasses import replace

from acme_dlm.acme import SPEC as ACME

SPEC = replace(ACME, name="llada")
""",
}

CONFIG = {
    "architectures": ["AcmeLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "model_type": "acme",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128,
}

LOAD = """
import sys

import torch
import transformers

import dlm_bridge
from dlm_bridge import Bridge, Layout

hub, megatron, back, *commands = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(hub)
assert type(model).__module__ == "acme_dlm.modeling_acme", type(model)
ids = torch.arange(12)[None]
tokens = model.generate(ids, gen_length=8, steps=4, block_length=8, eos_token_id=None)
assert tokens.shape == (1, 20) and not (tokens == 99).any()
ordered = dict(algorithm="acme_order", gen_length=4, acme_width=4, eos_token_id=None)
result = model.generate(ids, **ordered, return_dict_in_generate=True, output_history=True)
assert [step.committed[0].nonzero().item() for step in result.history] == [15, 14, 13, 12]
changed = ids.clone()
changed[0, -1] = 50
with torch.no_grad():
    assert not torch.allclose(model(ids).logits[0, 0], model(changed).logits[0, 0])  # bidirectional
Bridge.from_hf(hub).to_megatron(megatron, Layout(tp=2))
Bridge.from_megatron(megatron).to_hf(back)
again = transformers.AutoModelForCausalLM.from_pretrained(back)
assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())

from dlm_bridge.cli.app import main

for command in commands:
    sys.argv = ["dlm-bridge", *command.split()]
    try:
        main()
    except SystemExit as ended:
        print("exit code", ended.code or 0)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the package: built and installed by pip, without a network."""
    root = tmp_path_factory.mktemp("third_party")
    for name, text in FILES.items():
        (root / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "source" / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(root / "site"), str(root / "source")], check=True)
    path = filter(None, [str(root / "site"), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `ran` writes."""
    return tmp_path_factory.mktemp("acme")


@pytest.fixture(scope="module")
def ran(installed: dict[str, str], root: Path) -> subprocess.CompletedProcess[str]:
    """A process that uses all of the package, and then trains with its objective and with one that does not exist."""
    hub = write_hub_folder(root / "hub", CONFIG, standard_tensors(CONFIG, 0, qkv_bias=True))
    train = f"pretrain --model {hub} --data mock --steps 1 --seq-length 8 --global-batch-size 2 --eval-interval 0"
    commands = [
        f"{train} --objective acme_masked --output {root / 'run'}",
        f"{train} --objective acme --output {root / 'other'}",
    ]
    return subprocess.run(
        [sys.executable, "-c", LOAD, str(hub), str(root / "megatron"), str(root / "back"), *commands],
        env=installed,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_checkpoints_of_the_family_load_sample_and_convert(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode == 0, ran.stderr
    assert any("acme-dlm" in line and "dlm_bridge.samplers" in line for line in ran.stderr.splitlines())
    assert any("entry point taken" in line and "'llada'" in line for line in ran.stderr.splitlines())


def test_what_cannot_be_registered_is_named_and_left_out(installed: dict[str, str]) -> None:
    command = [sys.executable, "-m", "dlm_bridge.cli", "families", "--json"]
    ran = subprocess.run(command, env=installed, capture_output=True, text=True, check=True)
    assert '"family": "acme"' in ran.stdout
    warnings = ran.stderr.splitlines()
    assert len(warnings) == 2
    for words in (("acme-dlm", "absent"), ("taken", "llada")):
        assert any(all(word in line for word in words) for line in warnings), warnings


@pytest.mark.slow
def test_the_objective_of_the_package_trains_its_family(ran: subprocess.CompletedProcess[str], root: Path) -> None:
    assert "'masked' of dlm_bridge.objectives is taken" in ran.stderr
    assert (root / "run/checkpoints/step-0000001").is_dir()
    assert "objective: acme_masked" in (root / "run/config.yaml").read_text()
    assert [line for line in ran.stdout.splitlines() if line.startswith("exit code")] == ["exit code 0", "exit code 2"]
    refused = [line for line in ran.stderr.splitlines() if line.startswith("dlm-bridge: ") and "--objective" in line]
    assert "acme_masked" in refused[-1]
