"""verify finds every kind of difference and nothing else; inspect describes a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.inspect import inspect_checkpoint
from dlm_bridge.convert.verify import verify_manifest, verify_pair
from dlm_bridge.errors import CheckpointError
from tests.checkpoints import llada_config, llada_tensors, write_hub_folder, write_llada
from tests.convert.helpers import hub_tensors, run_cli, save_dcp
from tests.convert.test_torch_dist import expected
from tests.refusals import refused

PREFIX = "model.transformer.blocks."


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A one-file checkpoint that a test may change."""
    return write_llada(tmp_path / "hub", shards=1, n_kv_heads=2)


def edited(source: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """A copy with tensors replaced, removed (None) or added; `__` in a name stands for a dot."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("against", ["hub", "megatron"])
def test_kinds_of_difference(tmp_path: Path, single: Path, against: str) -> None:
    tensors = hub_tensors(single)
    flipped = tensors[PREFIX + "1.up_proj.weight"].clone()
    flipped.view(torch.int32)[5, 7] ^= 1  # the lowest bit
    nan = tensors[PREFIX + "3.ff_norm.weight"].clone()
    other = edited(
        single,
        tmp_path / "other",
        model__transformer__blocks__1__up_proj__weight=flipped,
        model__transformer__blocks__2__q_proj__weight=tensors[PREFIX + "2.q_proj.weight"].T.contiguous(),
        model__transformer__blocks__0__ff_norm__weight=None,
        model__transformer__blocks__3__attn_norm__weight=tensors[PREFIX + "3.attn_norm.weight"].bfloat16(),
        model__transformer__blocks__3__k_proj__weight=tensors[PREFIX + "3.k_proj.weight"][:, :60].contiguous(),
        model__transformer__blocks__3__ff_norm__weight=nan,
        surplus=torch.zeros(2),
    )
    first = single
    if against == "megatron":
        first = tmp_path / "m"
        Bridge.from_hf(single).to_megatron(first, Layout(tp=2, pp=2))
    verdict = verify_pair(first, other)
    assert not verdict.equal
    found = {item.name: (item.kind, item.detail) for item in verdict.differences}
    assert found.keys() == {
        *(PREFIX + name for name in ("1.up_proj.weight", "2.q_proj.weight", "0.ff_norm.weight")),
        *(PREFIX + name for name in ("3.attn_norm.weight", "3.k_proj.weight")),
        "surplus",
    }
    kind, detail = found[PREFIX + "1.up_proj.weight"]
    assert kind == "values"
    assert detail.startswith("1 of 6144 elements, first at [5, 7]")
    assert found[PREFIX + "2.q_proj.weight"][0] == "values"
    assert found[PREFIX + "0.ff_norm.weight"] == ("missing", f"not in {other}")
    assert found["surplus"] == ("missing", f"not in {first}")
    assert found[PREFIX + "3.attn_norm.weight"] == ("dtype", "float32 and bfloat16")
    assert found[PREFIX + "3.k_proj.weight"] == ("shape", "[32, 64] and [32, 60]")
    backwards = {item.name for item in verify_pair(other, first).differences}
    assert backwards == found.keys()


def test_swapped_gate_and_up_is_seen(tmp_path: Path, single: Path) -> None:
    """Equal shapes and equal sets of values: only a comparison of single tensors detects it."""
    state = expected(hub_tensors(single))
    key = "decoder.layers.mlp.linear_fc1.weight"
    state[key] = torch.cat([state[key][:, 96:], state[key][:, :96]], dim=1)
    save_dcp(state, tmp_path / "m" / "iter_0000001")
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("1")
    verdict = verify_pair(single, tmp_path / "m")
    assert {item.name for item in verdict.differences} == {
        f"{PREFIX}{layer}.{name}.weight" for layer in range(4) for name in ("ff_proj", "up_proj")
    }


def test_missing_and_surplus_megatron_tensors(tmp_path: Path, single: Path) -> None:
    state = expected(hub_tensors(single))
    state["decoder.surplus"] = state.pop("decoder.final_layernorm.weight")
    save_dcp(state, tmp_path / "m" / "iter_0000001")
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("1")
    found = {item.name: item.kind for item in verify_pair(single, tmp_path / "m").differences}
    assert found == {"model.transformer.ln_f.weight": "missing", "decoder.surplus": "extra"}


def test_nan_equals_itself(tmp_path: Path) -> None:
    config = llada_config(n_layers=1)
    tensors = llada_tensors(config)
    tensors[PREFIX + "0.ff_norm.weight"][3] = float("nan")
    source = write_hub_folder(tmp_path / "hub", config, tensors)
    Bridge.from_hf(source).to_megatron(tmp_path / "m")
    assert verify_pair(source, tmp_path / "m").equal


@pytest.mark.parametrize("kind", ["hub", "megatron"])
def test_against_the_manifest(tmp_path: Path, llada: Path, kind: str) -> None:
    Bridge.from_hf(llada).to_megatron(tmp_path / "m")
    folder = tmp_path / "m"
    if kind == "hub":
        folder = tmp_path / "out"
        Bridge.from_megatron(tmp_path / "m").to_hf(folder)
    assert verify_manifest(folder).equal
    side = folder / ("README.md" if kind == "hub" else "hf/README.md")
    text = side.read_bytes()
    side.write_bytes(text + b" ")
    verdict = verify_manifest(folder)
    assert [(item.name, item.kind) for item in verdict.differences] == [(str(side.relative_to(folder)), "file")]
    side.unlink()
    assert [item.detail for item in verify_manifest(folder).differences] == ["is missing"]
    side.write_bytes(text)
    if kind == "hub":
        path = folder / "model-00002-of-00002.safetensors"
        data = bytearray(path.read_bytes())
        data[-9] ^= 0x40  # in the last tensor of the file
        path.write_bytes(bytes(data))
        last = json.loads((folder / "dlm_bridge.json").read_text())["shards"][1]["tensors"][-1]
        assert [(item.name, item.kind) for item in verify_manifest(folder).differences] == [(last, "values")]
        data[-9] ^= 0x40
        path.write_bytes(bytes(data).replace(b'"format":"pt"', b'"format":"pu"', 1))
        assert [item.kind for item in verify_manifest(folder).differences] == ["file"]


def test_nothing_to_verify_against(tmp_path: Path, llada: Path) -> None:
    with refused(CheckpointError, llada, "dlm_bridge.json"):
        verify_manifest(llada)
    Bridge.from_hf(llada).to_megatron(tmp_path / "m")
    shutil.copytree(tmp_path / "m" / "iter_0000000", tmp_path / "m" / "iter_0000005")
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("5")
    with refused(CheckpointError, tmp_path / "m", "iter_0000000", "iter_0000005"):
        verify_manifest(tmp_path / "m")
    with pytest.raises(DlmBridgeError, match="no such folder"):
        verify_pair(llada, tmp_path / "nowhere")
    with pytest.raises(DlmBridgeError, match="is not a checkpoint"):
        verify_pair(llada, tmp_path)


def test_inspect(tmp_path: Path, llada: Path) -> None:
    facts = inspect_checkpoint(llada)
    tensors = hub_tensors(llada)
    assert (facts.format, facts.family, facts.architecture) == ("huggingface", "llada", "LLaDAModelLM")
    assert facts.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert facts.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert facts.dtypes == {"float32": len(tensors)}
    assert facts.sizes is not None
    assert facts.sizes["layers"] == 4
    layout = Layout(tp=2, pp=2, vp=2)
    Bridge.from_hf(llada).to_megatron(tmp_path / "m", layout)
    for path in (tmp_path / "m", tmp_path / "m" / "iter_0000000"):
        other = inspect_checkpoint(path)
        assert (other.format, other.family, other.iteration) == ("torch_dist", "llada", 0)
        assert (other.parameters, other.tensors, other.dtypes) == (facts.parameters, facts.tensors, facts.dtypes)
        assert other.layout == layout.as_dict()
        assert other.source is not None
        assert other.source["name"] == str(llada)
        assert sorted(other.files) == [f"__{rank}_0.distcp" for rank in range(4)]


def test_inspect_without_manifest(tmp_path: Path, llada: Path) -> None:
    state = expected(hub_tensors(llada))
    save_dcp({**state, "optimizer.state.exp_avg.x": torch.zeros(3)}, tmp_path / "m" / "iter_0000007")
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("7")
    facts = inspect_checkpoint(tmp_path / "m")
    assert (facts.family, facts.iteration, facts.training_state) == (None, 7, 1)
    assert facts.parameters == sum(tensor.numel() for tensor in state.values())


def test_tied_parameters_count_once(tmp_path: Path) -> None:
    config = llada_config(weight_tying=True)
    tensors = llada_tensors(config)
    count = sum(tensor.numel() for tensor in tensors.values())
    tensors["model.transformer.ff_out.weight"] = tensors["model.transformer.wte.weight"].clone()
    assert inspect_checkpoint(write_hub_folder(tmp_path / "hub", config, tensors)).parameters == count


def test_verify_exit_codes(tmp_path: Path, single: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = edited(single, tmp_path / "same")
    other = edited(single, tmp_path / "other", model__transformer__ln_f__weight=torch.zeros(64))
    code, out, err = run_cli(capsys, "verify", single, same)
    assert (code, err) == (0, "")
    assert "are equal" in out
    code, out, _ = run_cli(capsys, "verify", single, other)
    assert code == 1
    assert "model.transformer.ln_f.weight" in out.replace("\n", "")
    code, out, err = run_cli(capsys, "verify", single, other, "--json")
    assert (code, err) == (1, "")
    verdict = json.loads(out)
    assert verdict["equal"] is False
    assert [item["name"] for item in verdict["differences"]] == ["model.transformer.ln_f.weight"]
    code, out, err = run_cli(capsys, "verify", single, tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert "no such folder" in err
