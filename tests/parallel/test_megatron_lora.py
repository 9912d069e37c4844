"""LoRA and DoRA in the Megatron engine: the Accelerate engine, layouts against one process, the way to PEFT."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dlm_bridge import Bridge
from dlm_bridge.convert.lora import export_adapter, open_adapter
from dlm_bridge.convert.lora.tensors import adapter_tensors
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.lora import EXPERTS
from tests.convert.helpers import run_cli
from tests.parallel.megatron_cases import SUBJECTS as MODELS
from tests.parallel.megatron_cases import Files
from tests.parallel.megatron_lora_worker import CHANGES, DORA, adapter
from tests.parallel.megatron_worker import LayoutChanges, Results
from tests.processes import assert_ok
from tests.train.conftest import Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
RANK, ALPHA = 3, 12
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
FIGURES = ("loss", "grad_norm", "eval_loss")


def write_adapter(folder: Path, base: Path, targets: list[str], dora: bool = False) -> Path:
    """A PEFT folder whose factors are both far from zero; the target `experts` is routed experts. Magnitudes are far
    from the norms of the base's rows."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=[target for target in targets if target != EXPERTS],
        target_parameters=["experts.down_proj", "experts.gate_up_proj"] if EXPERTS in targets else None,
        use_dora=dora,
    )
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
    for name, weight in peft.named_parameters():
        if ".lora_magnitude_vector" in name:
            weight.data *= 1 + 0.3 * torch.randn_like(weight)
        elif ".lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    peft.save_pretrained(folder)
    return folder


def factors(place: Path, base: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Those of an adapter by Hub weight, in either layout."""
    found = open_adapter(place, Bridge.from_hf(base).checkpoint)
    facts = found.facts
    return {(weight, part): found.tensor(weight, part) for weight in facts.modules for part in facts.factors}


def rounding(tensor: torch.Tensor) -> float:
    """Of its largest element: what moved little is told from another by no less."""
    return float(tensor.abs().max()) * torch.finfo(tensor.dtype).eps


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("lora")).write_some(
        *{"masked", "latent", "causal-moe", "shifted-moe", *CHANGES.subjects, *DORA.subjects}
    )


@pytest.fixture
def options(files: Files) -> dict[str, Any]:
    given = files.run_options("unused", from_scratch=False, steps=3, save_interval=3, warmup_steps=0, eval_interval=3)
    return {name: value for name, value in given.items() if name not in ("output", "engine")}


@pytest.mark.parametrize(
    ("subject", "targets", "dora"),
    [
        ("masked", ["q_proj", "v_proj", "attn_out", "ff_proj", "ff_out"], False),
        ("masked", ["q_proj", "v_proj", "attn_out", "ff_proj", "ff_out"], True),
        # gate_proj: of dense layers and shared experts
        ("block-moe", ["query_key_value", "gate_proj", EXPERTS], False),
        ("latent", [*LATENT, EXPERTS], False),
        pytest.param("latent", LATENT, True, marks=pytest.mark.slow),
        pytest.param("block-moe", ["query_key_value", "dense", "gate_proj"], True, marks=pytest.mark.slow),
        pytest.param("shifted", ["q_proj", "k_proj", "o_proj", "up_proj"], True, marks=pytest.mark.slow),  # biases
        pytest.param("masked-moe", [EXPERTS], False, marks=pytest.mark.slow),
        pytest.param("shifted-moe", ["q_proj", EXPERTS], False, marks=pytest.mark.slow),
        pytest.param("causal-moe", ["k_proj", EXPERTS], False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.fast("block-moe-*", "masked-targets1-*")
def test_both_engines_train_an_adapter_alike(
    subject: str,
    targets: list[str],
    dora: bool,
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

    base = files.hub(subject)
    start = write_adapter(tmp_path / "start", base, targets, dora)
    options |= {"adapter": str(start), "model": str(base), "objective": MODELS[subject].objective, "family": None}
    options["adam_eps"] = 1.0  # Adam's steps of gradients that are next to nothing would be noise
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
        assert float((found[name] - tensor).abs().max()) <= 1e-3 * moved + rounding(tensor), name
    for output, flags in (("peft", ()), ("merged", ("--merge",))):
        code, _, err = run_cli(capsys, "adapter", "export", trained, tmp_path / output, "--base", base, *flags)
        assert code == 0, err
    exported, given = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "peft", start))
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        name: tensor.shape for name, tensor in given.items()
    }
    with pytest.raises(DlmBridgeError, match=str(trained)):
        Bridge.from_megatron(trained)
    ids = torch.arange(3, 19)[None]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        unchanged, expected = plain(ids).logits, merged(ids).logits
        adapted = PeftModel.from_pretrained(plain, tmp_path / "peft").eval()(ids).logits
    assert torch.allclose(adapted, expected, atol=1e-4)
    assert not torch.allclose(unchanged, expected, atol=1e-2)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.fast("True")
def test_a_new_adapter_changes_nothing_yet(
    dora: bool, tmp_path: Path, on_megatron: Run, files: Files, options: dict[str, Any]
) -> None:
    """And then learns."""
    options |= {"eval_interval": 1, "steps": 2, "save_interval": 2}
    still = on_megatron(tmp_path / "still", **{**options, "lr": 0.0})
    rows = on_megatron(tmp_path / "run", **options, lora_rank=RANK, lora_dora=dora)
    assert rows[0]["loss"] == pytest.approx(still[0]["loss"], rel=1e-6)
    assert rows[1]["loss"] != pytest.approx(still[1]["loss"], rel=1e-6)
    found = factors(tmp_path / "run/checkpoints", files.hub("masked"))
    assert all(bool(tensor.abs().max() > 0) for tensor in found.values())
    assert any(part == "magnitude" for _, part in found) == dora


@pytest.mark.slow
def test_magnitudes_of_a_model_in_half_precision_are_fp32(
    tmp_path: Path, run: Run, on_megatron: Run, files: Files, options: dict[str, Any]
) -> None:
    """They multiply whole outputs. A resume changes nothing; a PEFT folder keeps both dtypes, and goes on."""
    base = files.hub("masked")
    options |= {"lora_rank": RANK, "lora_dora": True, "steps": 4, "save_interval": 2, "eval_interval": 4}
    exact = on_megatron(tmp_path / "exact", **options)
    options["precision"] = "bf16"
    rows = on_megatron(tmp_path / "whole", **options)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in exact], rel=0.02)
    on_megatron(tmp_path / "resumed", **{**options, "steps": 2})
    on_megatron(tmp_path / "resumed", resume=True, **options)
    found, wanted = (factors(tmp_path / name / "checkpoints", base) for name in ("resumed", "whole"))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert {(part, tensor.dtype) for (_, part), tensor in found.items()} == {
        ("A", torch.bfloat16),
        ("B", torch.bfloat16),
        ("magnitude", torch.float32),
    }
    opened = Bridge.from_hf(base).checkpoint
    export_adapter(open_adapter(tmp_path / "whole/checkpoints", opened), opened, tmp_path / "peft")
    back = factors(tmp_path / "peft", base)
    assert all(torch.equal(back[name], tensor) for name, tensor in wanted.items())
    more = {**options, "lora_rank": 0, "lora_dora": False, "adapter": str(tmp_path / "peft"), "steps": 1}
    more["precision"] = "fp32"
    (row,), (theirs,) = on_megatron(tmp_path / "more", **more), run(tmp_path / "accelerate", **more)
    assert row["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.slow
def test_another_base_of_the_same_shape_is_refused(
    tmp_path: Path, run: Run, on_megatron: Run, files: Files, options: dict[str, Any]
) -> None:
    """On a resume, and of the Accelerate engine's adapter."""
    options |= {"steps": 1, "save_interval": 1, "lora_rank": RANK}
    run(tmp_path / "accelerate", **options)
    start = {**options, "lora_rank": 0, "adapter": str(tmp_path / "accelerate/checkpoints/step-0000001")}
    on_megatron(tmp_path / "more", **start)
    other = another(files.hub("masked"), tmp_path)
    with pytest.raises(DlmBridgeError, match=str(start["adapter"])):
        on_megatron(tmp_path / "other", **{**start, "model": str(other)})
    base = shutil.copytree(files.hub("masked"), tmp_path / "base")
    moved = {**options, "model": str(base), "steps": 2}
    on_megatron(tmp_path / "run-of-base", **{**moved, "steps": 1})
    shutil.copytree(other, base, dirs_exist_ok=True)
    with pytest.raises(DlmBridgeError, match="run-of-base/checkpoints"):
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
    ("subject", "changes", "named"),
    [
        ("latent", {"lora_targets": "q_proj"}, "lora_targets: .*q_proj"),
        ("masked", {"sample_interval": 1, "sample_prompt": ["a"]}, "sample.interval"),
        ("masked", {"fsdp": "optim"}, "fsdp"),
        ("masked", {"lora_dropout": 0.1}, "lora.dropout"),
        ("masked", {"lora_targets": "nothing"}, "lora_targets: .*nothing"),
        ("masked-moe", {"lora_targets": "gate_proj"}, "lora_targets: .*gate_proj.*experts"),
        ("masked", {"lora_targets": "experts"}, "lora_targets: .*experts"),
        ("masked-moe", {"lora_dora": True, "lora_targets": "q_proj,experts"}, "lora.dora.*experts"),
    ],
)
def test_refusals(
    subject: str,
    changes: dict[str, Any],
    named: str,
    tmp_path: Path,
    on_megatron: Run,
    files: Files,
    options: dict[str, Any],
) -> None:
    case = {"model": str(files.hub(subject)), "objective": MODELS[subject].objective}
    with pytest.raises(DlmBridgeError, match=named):
        on_megatron(tmp_path / "run", **{**options, **case, "family": None, "lora_rank": 2, **changes})


class GroupedLinear(torch.nn.Module):
    """As Transformer Engine's: a weight for each expert, and how many tokens each has."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        for number, weight in enumerate(weights):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(weight, requires_grad=False))

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        parts = [part @ getattr(self, f"weight{number}").T for number, part in enumerate(x.split(m_splits))]
        return torch.cat(parts), None


@pytest.mark.parametrize(
    ("dtype", "rank", "columns", "rows"),
    [
        (torch.float32, 3, 16, 8),
        (torch.bfloat16, 8, 16, 24),
        (torch.bfloat16, 3, 20, 18),
        (torch.float64, 3, 16, 8),  # not one product
    ],
)
def test_a_grouped_product_is_that_of_each_expert(dtype: torch.dtype, rank: int, columns: int, rows: int) -> None:
    """With its gradients, for any number of tokens, none among them."""
    from dlm_bridge.parallel.lora import grouped_linear

    for tokens in ([3, 0, 5, 1], [0, 0, 0, 0], [0, 7, 0, 0]):
        torch.manual_seed(0)
        x = torch.randn(sum(tokens), columns, dtype=dtype, requires_grad=True)
        factors = [torch.randn(shape, dtype=dtype) for shape in ((rank, columns), (rows, rank)) for _ in tokens]
        inputs = [x, *(factor.requires_grad_() for factor in factors)]
        a, b = inputs[1 : len(tokens) + 1], inputs[len(tokens) + 1 :]
        found = grouped_linear(grouped_linear(x, a, tokens), b, tokens)
        wanted = torch.cat([part @ a.T @ b.T for part, a, b in zip(x.split(tokens), a, b, strict=True)])
        given = torch.randn_like(wanted)
        torch.testing.assert_close(found, wanted)
        for ours, theirs in zip(
            torch.autograd.grad(found, inputs, given), torch.autograd.grad(wanted, inputs, given), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


def test_grouped_experts(files: Files, world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert's tokens pass through its own adapter, in a product for A and one for B; one expert has none."""
    from dlm_bridge.parallel.lora import ExpertAdapter

    products = []
    grouped_mm = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *a, **named: products.append(a) or grouped_mm(*a, **named)
    )
    base = Bridge.from_hf(files.hub("masked-moe")).checkpoint
    params = [param for param in base.params if param.expert is not None and param.layer == 1]
    params = [param for param in params if "linear_fc1" in param.rule.megatron]
    names = [name for param in params for name in param.hub_names]
    tensors = {(one.weights[0], one.part): one for one in adapter_tensors(base, names, RANK, "canonical", "here")}
    torch.manual_seed(0)
    weights = [torch.randn(param.megatron_shape) for param in params]
    linear = GroupedLinear([weight.clone() for weight in weights])
    drawn = {(name, "B"): torch.randn(base.spec(name)[1][0], RANK) for name in names}
    drawn |= {(param.hub_names[0], "A"): torch.randn(RANK, base.dims.hidden) for param in params}
    adapter = ExpertAdapter(params, tensors, 2.0, lambda name, part: drawn[name, part], linear)
    assert len({name for name, *_ in adapter.members}) == 2 * len(params)
    tokens = [3, 0, *[2] * (len(params) - 2)]
    x = torch.randn(sum(tokens), base.dims.hidden)
    found, _ = linear(x, tokens)
    assert len(products) == 2
    for part, param, weight, result in zip(x.split(tokens), params, weights, found.split(tokens), strict=True):
        gate, up = param.hub_names
        b = torch.cat([drawn[gate, "B"], drawn[up, "B"]])
        torch.testing.assert_close(result, part @ (weight + 2 * b @ drawn[gate, "A"]).T, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def said(files: Files) -> dict[str, Results]:
    for subject in CHANGES.subjects:
        targets = [*Bridge.from_hf(files.hub(subject)).family.lora_targets, *[EXPERTS] * MODELS[subject].experts]
        write_adapter(adapter(files.root, subject), files.hub(subject), targets)
    for subject in DORA.subjects:
        targets = list(Bridge.from_hf(files.hub(subject)).family.lora_targets)
        write_adapter(adapter(files.root, subject, DORA.name), files.hub(subject), targets, dora=True)
    found = CHANGES.launch("tests.parallel.megatron_lora_worker", files.root)
    return {CHANGES.name: found, DORA.name: DORA.results(files.root)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "processes", "name"), [(each.name, *check) for each in (CHANGES, DORA) for check in each.checks]
)
def test_processes(kind: str, processes: int, name: str, said: dict[str, Results]) -> None:
    """Losses and gradient norms of a run that stops in one layout and goes on in another are those of one process."""
    assert_ok(name, said[kind][processes], processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "subject", "name"),
    [(each, *run) for each in (CHANGES, DORA) for run in each.runs],
    ids=lambda value: getattr(value, "name", value),
)
def test_factors_are_those_of_one_process(
    changes: LayoutChanges, subject: str, name: str, files: Files, said: dict[str, Results]
) -> None:
    base = files.hub(subject)
    found = factors(files.run(name) / "checkpoints", base)
    wanted, begun = (
        factors(files.run(changes.whole(subject)) / "checkpoints", base),
        factors(adapter(files.root, subject, changes.name), base),
    )
    for name, tensor in wanted.items():
        moved = float((tensor - begun[name]).abs().max())
        assert moved > 0
        assert float((found[name] - tensor).abs().max()) <= 1e-3 * moved + rounding(tensor), name
