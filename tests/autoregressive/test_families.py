"""What every autoregressive family must do: load as in transformers, cross to Megatron and back bit for bit, and give
the same logits tensor parallel, in two processes of

python -m tests.autoregressive.test_families FOLDER
"""

from __future__ import annotations

import filecmp
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from transformers.distributed import DistributedConfig

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.checkpoints.in_memory import hub_tensors, stored_tensors
from dlm_bridge.convert.verify import verify_pair
from dlm_bridge.generation.autoregressive import sample
from dlm_bridge.generation.runtime.tensor_parallel import use_plain_shards
from dlm_bridge.models.families import families, find_family
from dlm_bridge.registration import extensions
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.lora import linear_layers, with_lora
from tests.autoregressive.cases import CASES, Case
from tests.families.case import layouts
from tests.processes import assert_ok, launch, work

DTYPES = [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16")]

IDS = torch.randint(0, 130, (2, 24), generator=torch.Generator().manual_seed(1))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_same_files(found: Path, expected: Path) -> None:
    for file in expected.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            assert filecmp.cmp(file, found / file.relative_to(expected), shallow=False), file.name


def in_model(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without what transformers drops on load: multi-token prediction layers and stored rotary frequencies."""
    mtp = f"model.layers.{case.config['num_hidden_layers']}."
    return {n: t for n, t in tensors.items() if not n.startswith(mtp) and not n.endswith("inv_freq")}


def test_every_family_has_a_case() -> None:
    assert {case.family for case in CASES} == {spec.name for spec in families() if spec.kind == "autoregressive"}


def test_transformers_own_classes_stay_what_they_are(case: Case, folder: Path) -> None:
    """Of those that transformers has: Ling's are this package's."""
    assert find_family(case.config) is case.spec
    name = case.published["architectures"][0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is case.spec.load("model_class")
    assert case.spec.native == hasattr(transformers, name)
    assert type(model) is getattr(transformers, name, type(model))
    assert type(transformers.AutoConfig.from_pretrained(folder)) is case.spec.load("config_class")


def test_an_adapter_has_targets_by_default(case: Case, folder: Path) -> None:
    """The queries' matrices among them; routed experts, whose weights are stacks, are not linear layers."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    given = {"model": str(folder), "data": ["mock"], "output": "out", "objective": "causal", "lora_rank": 2}
    targets = str(with_lora(TrainConfig.from_flags(**given), model).model.lora_targets).split(",")
    assert set(targets) <= linear_layers(model)
    assert any(name.startswith("q") for name in targets)


@pytest.mark.parametrize("case", [case for case in CASES if not case.spec.native], ids=lambda case: case.label)
def test_a_kv_cache_changes_no_token_of_a_class_of_this_package(case: Case, tmp_path: Path) -> None:
    """Which transformers' body hands its cache to, under the name that the installed version has for it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(case.write(tmp_path / "hub"), dtype=torch.float64)
    model.set_experts_implementation("eager")  # torch._grouped_mm has no float64
    ids = torch.randint(3, 130, (2, 6), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    cached, whole = (model.eval().generate(ids, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached, whole)


def test_mapping_covers_the_hubs_tensors(case: Case) -> None:
    """Each tensor exactly once, with its shape; from scratch the transformers model's are made."""
    mapping, tensors = case.spec.mapping, case.tensors()
    for config in (case.config, case.published):
        dims = mapping.dims(config)
        keys: dict[str, set[tuple[int, ...]]] = {}
        for param in mapping.params(dims):
            keys.setdefault(param.megatron_key, set()).add((*(n for _, n in param.stack), *param.megatron_shape))
        assert all(len(shapes) == 1 for shapes in keys.values())
    dims = mapping.dims(case.config)
    params = list(mapping.params(dims))
    covered = {name: shape for param in params for name, shape in zip(param.hub_names, param.hub_shapes, strict=True)}
    assert len(covered) == sum(len(param.hub_names) for param in params)
    assert tensors.keys() - covered.keys() <= mapping.passthrough_names(dims).keys()
    assert covered == {name: tuple(tensors[name].shape) for name in covered}
    started = dict(case.spec.initial_weights(case.config, seed=3))
    assert started.keys() == in_model(case, covered).keys()
    for name, tensor in started.items():
        zero = name.endswith("bias") or (case.family.startswith("gemma") and name.endswith("norm.weight"))
        assert bool(tensor.any()) != zero, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.fast(but=["deepseek-direct-q-*", "qwen2.5-tied-*", "llama3.1-*", "llama2-*", "mistral-nemo-*", "*-fp32"])
def test_round_trip(case: Case, tmp_path: Path, dtype: torch.dtype) -> None:
    source = case.write(tmp_path / "hub", dtype)
    expected = tensors_of(source)
    if not case.megatron:
        with pytest.raises(DlmBridgeError, match=re.escape(case.spec.mapping.hub_only)):
            Bridge.from_hf(source).to_megatron(tmp_path / "megatron")
        assert not (tmp_path / "megatron").exists()
        Bridge.from_hf(source).to_hf(tmp_path / "back")
        assert_same_bits(tensors_of(tmp_path / "back"), expected)
        return
    found = layouts(case.spec, case.config, every=dtype == torch.float32)
    for number, layout in enumerate(found):
        megatron, other, back = (tmp_path / f"{name}{number}" for name in ("megatron", "resharded", "back"))
        Bridge.from_hf(source).to_megatron(megatron, layout)
        Bridge.from_megatron(megatron).to_megatron(other, found[number - 1])
        Bridge.from_megatron(other).to_hf(back)
        assert_same_bits(tensors_of(back), expected)
        assert_same_files(back, source)
    assert verify_pair(source, tmp_path / "megatron1").equal


def test_logits_are_transformers_own(case: Case, folder: Path) -> None:
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    built = Bridge.from_hf(folder).build_hf_model()
    assert type(built) is type(expected)
    with torch.no_grad():
        assert torch.equal(built(IDS).logits, expected(IDS).logits)


@pytest.mark.fast(but=["deepseek-direct-q", "qwen2.5-tied", "llama3.1", "llama2", "mistral-nemo"])
def test_live_models_cross_the_bridge(case: Case, folder: Path, tmp_path: Path) -> None:
    live = Bridge.from_model(transformers.AutoModelForCausalLM.from_pretrained(folder))
    expected = in_model(case, tensors_of(folder))
    assert_same_bits({name: live.read(name) for name in live.hub_names()}, expected)
    if not case.megatron:
        return
    report = live.to_megatron(tmp_path / "megatron", Layout(tp=2, pp=2))
    assert any("multi-token" in note for note in report.notes) == bool(case.config.get("num_nextn_predict_layers"))
    Bridge.from_megatron(tmp_path / "megatron").to_hf(tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), expected)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
        assert torch.equal(model(IDS).logits, live.build_hf_model()(IDS).logits)


def test_a_missing_and_a_superfluous_tensor_are_named(case: Case, tmp_path: Path) -> None:
    from tests.checkpoints import write_hub_folder

    tensors = case.tensors()
    last = max(
        name for name in tensors if "layers." in name and not name.endswith(("inv_freq", "embed_tokens.weight"))
    )
    whole = dict(tensors)
    del tensors[last]
    with pytest.raises(DlmBridgeError, match=f"tensor {last} is missing"):
        Bridge.from_hf(write_hub_folder(tmp_path / "less", case.config, tensors)).to_hf(tmp_path / "out")
    whole["model.layers.0.self_attn.extra.weight"] = torch.zeros(1)
    with pytest.raises(DlmBridgeError, match=r"tensor model\.layers\.0\.self_attn\.extra\.weight is not part"):
        Bridge.from_hf(write_hub_folder(tmp_path / "more", case.config, whole)).to_hf(tmp_path / "out")


# ------------------------------------------------------------------------------------------- tensor parallel


# Cases that `make test` cuts over two processes: every kind of parameter.
CUT = ("llama3.2", "qwen2.5", "qwen3", "mixtral", "glm4-moe", "deepseek-v3", "ling", "gpt-oss", "phi3", "olmo2")


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of two processes said of each case of `CUT`."""
    return _in_two_processes(tmp_path_factory.mktemp("tensor_parallel"), [one for one in CASES if one.label in CUT])


@pytest.fixture(scope="module")
def other_tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of the other cases."""
    others = [one for one in CASES if one.label not in CUT]
    return _in_two_processes(tmp_path_factory.mktemp("other_tensor_parallel"), others)


def _in_two_processes(root: Path, cases: list[Case]) -> dict[str, list[str]]:
    for case in cases:
        case.write(root / case.label)
    return launch("tests.autoregressive.test_families", root, timeout_s=300)


@pytest.mark.parametrize("label", CUT)
def test_tensor_parallel_logits_and_samples_are_the_same(label: str, tensor_parallel: dict[str, list[str]]) -> None:
    assert_ok(label, tensor_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("label", [case.label for case in CASES if case.label not in CUT])
def test_tensor_parallel_logits_and_samples_of_the_others_are_the_same(
    label: str, other_tensor_parallel: dict[str, list[str]]
) -> None:
    assert_ok(label, other_tensor_parallel)


def check_tensor_parallel(case: Case, folder: Path) -> None:
    """Of shards that are loaded, as `generate --tp` does, and of shards that take their parts of streamed weights, as
    `rl --rollout-tp` does."""
    model_class = case.spec.load("model_class")
    whole = model_class.from_pretrained(folder).eval()
    loaded = model_class.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto")).eval()
    assert use_plain_shards(loaded)
    assert_same_outputs(loaded, whole)
    if "train.rl" not in extensions():
        return
    from dlm_bridge.train.rl.replica import RolloutModel

    copied = RolloutModel(whole, torch.float32, "", dist.group.WORLD)
    with copied.allocated(torch.device("cpu")) as model:
        for _, tensor in stored_tensors(model):
            tensor.data.fill_(torch.nan)
        writer = copied.hub_writer()
        for name, tensor in hub_tensors(whole, dict(stored_tensors(whole))).items():
            writer.write(name, tensor)
        assert_same_outputs(model, whole)


def assert_same_outputs(shards: transformers.PreTrainedModel, whole: transformers.PreTrainedModel) -> None:
    """Logits and greedy tokens, of fewer weights."""
    held, of = (sum(weight.numel() for weight in model.parameters()) for model in (shards, whole))
    assert held < of
    with torch.no_grad():
        torch.testing.assert_close(shards(IDS).logits, whole(IDS).logits, atol=1e-5, rtol=1e-5)
    settings = {"max_new_tokens": 5, "temperature": 0.0}
    found, expected = (sample(model, None, IDS, torch.ones_like(IDS), settings).sequences for model in (shards, whole))
    assert torch.equal(found, expected)


def checks(root: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    for case in (case for case in CASES if (root / case.label).is_dir()):
        yield case.label, partial(check_tensor_parallel, case, root / case.label)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work(Path(sys.argv[1]), checks(Path(sys.argv[1])))
