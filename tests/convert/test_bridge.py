"""The Python API: live models in and out, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dlm_bridge
from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.setup import model_source
from tests.checkpoints import llada_config, llada_tensors, write_hub_folder, write_llada
from tests.convert.helpers import dcp_tensors, hub_tensors, same, tree
from tests.refusals import refused


def load(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def test_names_of_the_package() -> None:
    assert dlm_bridge.Bridge is Bridge
    assert dlm_bridge.Layout is Layout


@pytest.mark.parametrize("tied", [False, True])
def test_a_live_model_goes_in_and_comes_out(tmp_path: Path, tied: bool) -> None:
    source = write_llada(tmp_path / "hub", n_kv_heads=2, weight_tying=tied)
    model = load(source)
    bridge = Bridge.from_model(model)
    wanted = hub_tensors(source)
    assert sorted(bridge.hub_names()) == sorted(wanted)
    bridge.to_megatron(tmp_path / "m", Layout(tp=2, pp=2))
    again = Bridge.from_megatron(tmp_path / "m")
    assert all(same(again.read(name), wanted[name]) for name in wanted)
    again.to_hf(tmp_path / "out")
    assert all(same(tensor, wanted[name]) for name, tensor in hub_tensors(tmp_path / "out").items())
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert new == old
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        logits = model.eval()(tokens).logits
        assert torch.equal(load(tmp_path / "out")(tokens).logits, logits)
        assert torch.equal(again.build_hf_model()(tokens).logits, logits)


def test_the_code_that_a_config_names_is_saved_with_a_megatron_checkpoint_s_model(tmp_path: Path) -> None:
    source = write_llada(tmp_path / "hub")
    Bridge.from_hf(source).to_megatron(tmp_path / "m")
    Bridge.from_megatron(tmp_path / "m").build_hf_model().save_pretrained(tmp_path / "out")
    config = TrainConfig.from_flags(model=str(source), data=["x"], output="y", from_scratch=True)
    model_source(config).load().save_pretrained(tmp_path / "new")
    code = {path.name: path.read_bytes() for path in source.glob("*.py")}
    assert code
    for folder in (tmp_path / "out", tmp_path / "new"):
        assert {path.name: path.read_bytes() for path in folder.glob("*.py")} == code
        assert "name_or_path" not in json.loads((folder / "config.json").read_text())


def test_a_live_model_is_shared(llada: Path) -> None:
    model = load(llada)
    bridge = Bridge.from_model(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(3)
    assert bool((bridge.read("model.transformer.wte.weight") == 3).all())


def test_every_parameter_comes_from_the_checkpoint(tmp_path: Path) -> None:
    source = write_llada(tmp_path / "hub", dtype=torch.bfloat16)
    Bridge.from_hf(source).to_megatron(tmp_path / "m", Layout(pp=2))
    model = Bridge.from_megatron(tmp_path / "m").build_hf_model()
    reference = load(source, dtype=torch.bfloat16)
    state = model.state_dict()
    assert all(same(state[name], tensor) for name, tensor in reference.state_dict().items())
    assert state.keys() == reference.state_dict().keys()
    assert {p.dtype for p in Bridge.from_hf(source).build_hf_model(dtype="fp32").parameters()} == {torch.float32}
    assert not model.training


def test_a_missing_tensor_is_never_initialised(tmp_path: Path) -> None:
    config = llada_config()
    tensors = llada_tensors(config)
    del tensors["model.transformer.blocks.1.up_proj.weight"]
    source = write_hub_folder(tmp_path / "hub", config, tensors)
    with refused(CheckpointError, source, "blocks.1.up_proj.weight"):
        Bridge.from_hf(source).build_hf_model()


def test_meta_models_have_no_values(llada: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llada))
    with pytest.raises(DlmBridgeError, match="meta"):
        Bridge.from_model(model)


def test_transposed_views_are_stored_as_they_read(tmp_path: Path, llada: Path) -> None:
    """A parameter that is a view in another memory order, and one that is a part of a larger storage."""
    model = load(llada)
    projection = model.get_submodule("model.layers.0.self_attn.o_proj")
    values = projection.weight.detach().clone()
    projection.weight = torch.nn.Parameter(values.T.contiguous().T)
    up = model.get_submodule("model.layers.1.mlp.up_proj")
    large = torch.cat([torch.zeros(5, 64), up.weight.detach(), torch.ones(7, 64)])
    up.weight = torch.nn.Parameter(large[5:-7])
    Bridge.from_model(model).to_megatron(tmp_path / "m", Layout(tp=2))
    stored = dcp_tensors(tmp_path / "m" / "iter_0000000")
    assert torch.equal(stored["decoder.layers.self_attention.linear_proj.weight"][0], values)
    assert torch.equal(stored["decoder.layers.mlp.linear_fc1.weight"][1, 96:], large[5:-7])
    assert sum(path.stat().st_size for path in (tmp_path / "m" / "iter_0000000").glob("*.distcp")) < 700_000


def test_dtype_names(llada: Path, tmp_path: Path) -> None:
    with refused(SettingError, "dtype", "int8"):
        Bridge.from_hf(llada).to_megatron(tmp_path / "m", dtype="int8")
    Bridge.from_hf(llada).to_megatron(tmp_path / "m", dtype=torch.bfloat16)
    assert {t.dtype for t in dcp_tensors(tmp_path / "m" / "iter_0000000").values()} == {torch.bfloat16}


def test_dry_run_checks_and_writes_nothing(llada: Path, tmp_path: Path) -> None:
    report = Bridge.from_hf(llada).to_megatron(tmp_path / "m", Layout(tp=2, pp=2), dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert report.seconds is None
    real = Bridge.from_hf(llada).to_megatron(tmp_path / "m", Layout(tp=2, pp=2))
    assert report.files == real.files
    assert {name: (tmp_path / "m" / name).stat().st_size for name in real.files} == real.files
    plan = Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out", dry_run=True)
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out")
    assert {name: (tmp_path / "out" / name).stat().st_size for name in plan.files} == plan.files
    with pytest.raises(DlmBridgeError, match="exists"):
        Bridge.from_hf(llada).to_megatron(tmp_path / "m", dry_run=True)


def test_progress_counts_every_byte(llada: Path, tmp_path: Path) -> None:
    total = sum(tensor.nbytes for tensor in hub_tensors(llada).values())
    told: list[tuple[int, int]] = []
    Bridge.from_hf(llada).to_megatron(tmp_path / "m", progress=lambda done, whole: told.append((done, whole)))
    assert sum(done for done, _ in told) == total
    assert {whole for _, whole in told} == {total}


def test_no_megatron_and_no_remote_code(tmp_path: Path, llada: Path) -> None:
    """Conversions run where megatron-core cannot be imported; the carried .py files would exit if run."""
    script = (
        "import sys; sys.modules['megatron'] = None; from dlm_bridge import Bridge, Layout; import sys\n"
        "Bridge.from_hf(sys.argv[1]).to_megatron(sys.argv[2] + '/m', Layout(tp=2, pp=2))\n"
        "Bridge.from_megatron(sys.argv[2] + '/m').to_hf(sys.argv[2] + '/out')\n"
        "assert 'torch.distributed' not in sys.modules or not __import__('torch').distributed.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(llada), str(tmp_path)], check=True)
    assert tree(tmp_path / "out") == tree(llada)
