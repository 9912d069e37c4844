"""LoRA in the Megatron engine: against the Accelerate engine, every layout against one process, the way to PEFT."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dlm_bridge import Bridge
from dlm_bridge.convert.lora import open_adapter
from dlm_bridge.convert.lora.peft import LORA_FACTORS
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.config import TrainConfig
from tests.convert.helpers import run_cli
from tests.processes import assert_ok, forked, launch
from tests.train.conftest import Run, read_metrics
from tests.train.megatron_cases import SUBJECTS as MODELS
from tests.train.megatron_cases import Files, _write_pair
from tests.train.megatron_lora_worker import STOPPED, SUBJECTS, adapter, plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
RANK, ALPHA = 3, 12
FIGURES = ("loss", "grad_norm", "eval_loss")


def write_adapter(folder: Path, base: Path, targets: list[str]) -> Path:
    """A PEFT folder whose factors are both far from zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=targets)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    for name, weight in peft.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    peft.save_pretrained(folder)
    return folder


def factors(place: Path, base: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Those of an adapter by Hub weight, in either layout."""
    found = open_adapter(place, Bridge.from_hf(base).checkpoint)
    return {(weight, part): found.tensor(weight, part) for weight in found.facts.modules for part in LORA_FACTORS}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of all, only what is used."""
    files = Files(tmp_path_factory.mktemp("lora"))
    for subject in {"masked", "latent", *SUBJECTS}:
        MODELS[subject].build().write(files.hub(subject))
    _write_pair(files.corpus, 60)
    return files


@pytest.fixture
def on_megatron(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`run` on the Megatron engine, alone in its world."""
    from dlm_bridge.parallel import groups
    from dlm_bridge.train.megatron.engine import train

    monkeypatch.setenv("DLM_BRIDGE_PLATFORM", "cpu")

    def _run(output: Path, resume: bool = False, **changes: Any) -> list[dict[str, Any]]:
        config = TrainConfig.from_flags(**{**values, "engine": "megatron", "output": str(output), **changes})
        train(config, resume, Console(quiet=True))
        return read_metrics(output)

    yield _run
    groups.destroy()


@pytest.fixture
def options(files: Files) -> dict[str, Any]:
    given = files.run_options("unused", from_scratch=False, steps=3, save_interval=3, warmup_steps=0, eval_interval=3)
    return {name: value for name, value in given.items() if name not in ("output", "engine")}


def test_both_engines_train_an_adapter_alike(
    tmp_path: Path,
    run: Run,
    on_megatron: Run,
    files: Files,
    options: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same losses, gradient norms and factors; what Megatron saved is a PEFT adapter, which transformers loads,
    and merged into the base it gives the same logits."""
    from peft import PeftModel

    base = files.hub("masked")
    start = write_adapter(tmp_path / "start", base, ["q_proj", "v_proj", "attn_out", "ff_proj", "ff_out"])
    options |= {"adapter": str(start)}
    ours, theirs = on_megatron(tmp_path / "megatron", **options), run(tmp_path / "accelerate", **options)
    for key in FIGURES:
        assert [row[key] for row in ours if key in row] == pytest.approx(
            [row[key] for row in theirs if key in row], rel=1e-4
        ), key
    trained = tmp_path / "megatron/checkpoints"
    found, begun = factors(trained, base), factors(start, base)
    wanted = factors(tmp_path / "accelerate/checkpoints/step-0000003", base)
    assert found.keys() == wanted.keys() == begun.keys()
    for name, tensor in wanted.items():
        moved = float((tensor - begun[name]).abs().max())
        assert moved > 0
        assert float((found[name] - tensor).abs().max()) <= 1e-3 * moved, name
    for output, flags in (("peft", ()), ("merged", ("--merge",))):
        code, _, err = run_cli(capsys, "adapter", "export", trained, tmp_path / output, "--base", base, *flags)
        assert code == 0, err
    assert len(load_file(tmp_path / "peft/adapter_model.safetensors")) == len(found)
    with pytest.raises(DlmBridgeError, match="is an adapter without its base"):
        Bridge.from_megatron(trained)
    ids = torch.arange(3, 19)[None]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        unchanged, expected = plain(ids).logits, merged(ids).logits
        adapted = PeftModel.from_pretrained(plain, tmp_path / "peft").eval()(ids).logits
    assert torch.allclose(adapted, expected, atol=1e-4)
    assert not torch.allclose(unchanged, expected, atol=1e-2)


def test_a_new_adapter_changes_nothing_yet(
    tmp_path: Path, on_megatron: Run, files: Files, options: dict[str, Any]
) -> None:
    """And then learns."""
    options |= {"eval_interval": 1, "steps": 2, "save_interval": 2}
    still = on_megatron(tmp_path / "still", **{**options, "lr": 0.0})
    rows = on_megatron(tmp_path / "run", **options, lora_rank=RANK)
    assert rows[0]["loss"] == pytest.approx(still[0]["loss"], rel=1e-6)
    assert rows[1]["loss"] != pytest.approx(still[1]["loss"], rel=1e-6)
    found = factors(tmp_path / "run/checkpoints", files.hub("masked"))
    assert all(bool(tensor.abs().max() > 0) for tensor in found.values())


def test_another_base_of_the_same_shape_is_refused(
    tmp_path: Path, run: Run, on_megatron: Run, files: Files, options: dict[str, Any]
) -> None:
    """On a resume, and of the Accelerate engine's adapter."""
    options |= {"steps": 1, "save_interval": 1, "lora_rank": RANK}
    run(tmp_path / "accelerate", **options)
    start = {**options, "lora_rank": 0, "adapter": str(tmp_path / "accelerate/checkpoints/step-0000001")}
    on_megatron(tmp_path / "more", **start)
    other = another(files.hub("masked"), tmp_path)
    with pytest.raises(DlmBridgeError, match="other weights than --model"):
        on_megatron(tmp_path / "other", **{**start, "model": str(other)})
    base = shutil.copytree(files.hub("masked"), tmp_path / "base")
    moved = {**options, "model": str(base), "steps": 2}
    on_megatron(tmp_path / "run-of-base", **{**moved, "steps": 1})
    shutil.copytree(other, base, dirs_exist_ok=True)
    with pytest.raises(DlmBridgeError, match="other weights than --model"):
        on_megatron(tmp_path / "run-of-base", resume=True, **moved)


def another(base: Path, root: Path) -> Path:
    """The base with a norm that is twice as large."""
    folder = root / "another"
    shutil.copytree(base, folder, dirs_exist_ok=True)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        doubled = {name: 2 * tensor if "norm" in name else tensor for name, tensor in tensors.items()}
        save_file(doubled, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("subject", "changes", "message"),
    [
        ("latent", {"lora_rank": 2}, "multi-latent attention"),
        ("masked", {"lora_rank": 2, "sample_interval": 1, "sample_prompt": ["a"]}, "--sample-interval"),
        ("masked", {"lora_rank": 2, "fsdp": "optim"}, "--fsdp optim"),
        ("masked", {"lora_rank": 2, "lora_dropout": 0.1}, "--lora-dropout"),
        ("masked", {"lora_rank": 2, "lora_targets": "nothing"}, "--lora-targets nothing"),
        ("block-moe", {"lora_rank": 2, "lora_targets": "gate_proj"}, "--lora-targets gate_proj.*routed experts"),
        ("block-moe", {"lora_rank": 2, "lora_targets": "experts"}, "--lora-targets experts.*routed experts"),
    ],
)
def test_refusals(
    subject: str,
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    on_megatron: Run,
    files: Files,
    options: dict[str, Any],
) -> None:
    case = {"model": str(files.hub(subject)), "objective": MODELS[subject].objective}
    with pytest.raises(DlmBridgeError, match=message):
        on_megatron(tmp_path / "run", **{**options, **case, "family": None, **changes})


@pytest.fixture(scope="module")
def said(files: Files) -> dict[int, dict[str, list[str]]]:
    for subject in SUBJECTS:
        targets = list(Bridge.from_hf(files.hub(subject)).family.lora_targets)
        write_adapter(adapter(files.root, subject), files.hub(subject), targets)
    launch("tests.train.megatron_lora_worker", files.root, processes=1, timeout_s=1100)
    return {processes: forked(files.root / f"lora{processes}", processes) for processes in (1, *STOPPED)}


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "name"), [(number, name) for number in (1, *STOPPED) for name in plan(number)])
def test_processes(processes: int, name: str, said: dict[int, dict[str, list[str]]]) -> None:
    """Losses and gradient norms of a run that stops in one layout and goes on in another are those of one process."""
    assert_ok(name, said[processes], processes)


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "before"), [run[:2] for runs in STOPPED.values() for run in runs])
def test_factors_are_those_of_one_process(
    subject: str, before: str, files: Files, said: dict[int, dict[str, list[str]]]
) -> None:
    base = files.hub(subject)
    found = factors(files.run(f"lora-{subject}-{before}") / "checkpoints", base)
    wanted, begun = (
        factors(files.run(f"lora-{subject}") / "checkpoints", base),
        factors(adapter(files.root, subject), base),
    )
    for name, tensor in wanted.items():
        moved = float((tensor - begun[name]).abs().max())
        assert moved > 0
        assert float((found[name] - tensor).abs().max()) <= 1e-3 * moved, name
