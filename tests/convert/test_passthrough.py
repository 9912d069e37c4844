"""Hub tensors that Megatron has no place for travel beside the checkpoint and come back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.verify import verify_manifest, verify_pair
from dlm_bridge.mapping.rules import Passthrough
from dlm_bridge.models import families
from dlm_bridge.models.llada import MAPPING as LLADA_MAPPING
from dlm_bridge.models.llada import SPEC
from tests.checkpoints import llada_config, llada_tensors, write_hub_folder
from tests.convert.helpers import tree

INV_FREQ = "model.rotary_emb.inv_freq"
MAPPING = replace(LLADA_MAPPING, passthrough=(*LLADA_MAPPING.passthrough, Passthrough(INV_FREQ)))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of a family like LLaDA whose Hub files hold a derivable tensor."""
    spec = replace(SPEC, mapping=MAPPING)
    monkeypatch.setattr(families, "families", lambda: (spec,))
    families._by_architecture.cache_clear()
    config = llada_config(weight_tying=True)
    tensors = llada_tensors(config, dtype=torch.bfloat16)
    tensors["model.transformer.ff_out.weight"] = tensors["model.transformer.wte.weight"].clone()
    tensors[INV_FREQ] = torch.arange(8).float() ** -0.5
    yield write_hub_folder(tmp_path / "hub", config, tensors)
    families._by_architecture.cache_clear()


def test_there_and_back(tmp_path: Path, source: Path) -> None:
    Bridge.from_hf(source).to_megatron(tmp_path / "m", Layout(tp=2, pp=2))
    Bridge.from_megatron(tmp_path / "m").to_megatron(tmp_path / "m2")
    Bridge.from_megatron(tmp_path / "m2").to_hf(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(source)
    for path in ("m", "m2", "out"):
        assert verify_manifest(tmp_path / path).equal
        assert verify_pair(source, tmp_path / path).equal
    assert (tmp_path / "m2" / "hf" / "carried.safetensors").stat().st_size < 300  # the tied head is not stored twice


def test_a_lost_passthrough_tensor_is_named(tmp_path: Path, source: Path) -> None:
    Bridge.from_hf(source).to_megatron(tmp_path / "m")
    (tmp_path / "m" / "hf" / "carried.safetensors").unlink()
    with pytest.raises(DlmBridgeError, match=r"carried\.safetensors"):
        Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out")


def test_passthrough_tensors_come_from_like(tmp_path: Path, source: Path) -> None:
    Bridge.from_hf(source).to_megatron(tmp_path / "m")
    for name in ("dlm_bridge.json", "hf/carried.safetensors"):
        (tmp_path / "m" / name).unlink()
    Bridge.from_megatron(tmp_path / "m", like=source).to_hf(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(source)
