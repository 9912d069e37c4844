"""Models whose weights are read in parts have the values, dtypes and buffers of those that are loaded whole."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_bridge import Bridge
from dlm_bridge.errors import CheckpointError
from dlm_bridge.loading import lazy
from dlm_bridge.loading.source import ModelSource
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.setup import model_source, starting_model
from tests.autoregressive.cases import CASES as AUTOREGRESSIVE
from tests.families import dream, llada, llada2_moe
from tests.families.case import FamilyCase, all_cases
from tests.refusals import refused

FAST = ("llada2_moe", "phi3")
ALL = [*all_cases(), *AUTOREGRESSIVE]


def named(case: Any) -> str:
    return " ".join(part for part in (getattr(case, "name", ""), case.label) if part)


def config_of(place: Path, **options: Any) -> TrainConfig:
    return TrainConfig.from_flags(model=str(place), data=["mock"], output="o", sharding="fsdp", **options)


def assert_same_model(config: TrainConfig) -> None:
    """What `starting_model` reads in parts is what `ModelSource.load` loads."""
    starting, loaded = starting_model(config, None, main=True), model_source(config).load()
    model, weights = starting.model, starting.weights
    assert weights is not None
    found, wanted = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert found[name].is_meta
        assert found[name].dtype == weight.dtype, name
        assert torch.equal(weights.whole(name, weight.shape).to(weight.dtype), weight), name
        start, stop = weight.numel() // 3, weight.numel() // 3 * 2
        for place, values in weights.read(name, start, stop):
            expected = weight.reshape(-1)[start + place : start + place + len(values)]
            assert torch.equal(values.to(weight.dtype), expected), name
    assert model.state_dict().keys() == loaded.state_dict().keys()
    held, buffers = dict(model.named_buffers()), dict(loaded.named_buffers())
    assert held.keys() == buffers.keys()
    for name, buffer in buffers.items():
        value = weights.whole(name, buffer.shape).to(held[name].dtype) if name in weights else held[name]
        assert value.dtype == buffer.dtype, name
        assert torch.equal(value, buffer), name
    assert model.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert model.training == loaded.training


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=named(case), marks=[] if named(case) in FAST else pytest.mark.slow) for case in ALL],
)
@pytest.mark.parametrize("source", ["hub", "adapter", "scratch"])
def test_every_family_is_read_in_parts(case: Any, source: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"family": case.name} if isinstance(case, FamilyCase) else {}
    options |= {"hub": {}, "adapter": {"lora_rank": 2, "precision": "bf16"}, "scratch": {"from_scratch": True}}[source]
    assert_same_model(config_of(case.write(tmp_path / "hub", torch.bfloat16), **options))


@pytest.mark.parametrize(
    ("case", "format_"),
    [
        pytest.param(llada2_moe.CASES[0], "torch_dist", id="experts, torch_dist"),
        pytest.param(llada2_moe.CASES[0], "torch", id="experts, torch", marks=pytest.mark.slow),
        pytest.param(llada.CASES[0], "torch_dist", id="dense, torch_dist", marks=pytest.mark.slow),
    ],
)
def test_a_megatron_checkpoint_is_read_in_parts(case: FamilyCase, format_: str, tmp_path: Path) -> None:
    bridge = Bridge.from_hf(case.write(tmp_path / "hub", torch.bfloat16))
    bridge.to_megatron(tmp_path / "megatron", Layout(tp=2, pp=2), format=format_)
    assert_same_model(config_of(tmp_path / "megatron"))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    folder = dream.CASE.write(tmp_path / "hub", tie_word_embeddings=True)
    model = starting_model(config_of(folder, from_scratch=True), None, main=True).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_only_the_asked_bytes_of_a_megatron_checkpoint_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlm_bridge.convert import streaming

    Bridge.from_hf(llada.CASES[0].write(tmp_path / "hub")).to_megatron(tmp_path / "megatron", Layout(tp=2))
    checkpoint = Bridge.from_megatron(tmp_path / "megatron").checkpoint
    read, counted = streaming.read_at, 0

    def count(fd: int, path: Path, offset: int, view: memoryview) -> None:
        nonlocal counted
        counted += len(view)
        read(fd, path, offset, view)

    monkeypatch.setattr(streaming, "read_at", count)
    name = next(name for name in checkpoint.hub_names() if "q_proj" in name)
    _, (rows, columns) = checkpoint.spec(name)
    values = checkpoint.read_elements(name, rows // 2 * columns, rows * columns)
    assert counted == values.nbytes == rows // 2 * columns * 4
    assert torch.equal(values.view(-1, columns), checkpoint.read(name)[rows // 2 :])


# Checkpoints that are not read in parts: what is changed, and what names the reason.


def _lacking(tensors: dict[str, torch.Tensor]) -> str:
    name = next(iter(tensors))
    del tensors[name]
    return name


def _more(tensors: dict[str, torch.Tensor]) -> str:
    tensors["more.weight"] = torch.zeros(2)
    return "more.weight"


def _integers(tensors: dict[str, torch.Tensor]) -> str:
    name = next(iter(tensors))
    tensors[name] = tensors[name].to(torch.int32)
    return name


@pytest.mark.parametrize("change", [_lacking, _more, _integers])
def test_an_odd_checkpoint_is_read_whole_by_the_first_process(
    change: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = llada.CASES[0].write(tmp_path / "hub")
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    odd = change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(folder)
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patched:
        patched.setattr(ModelSource, "load", lambda source: "loaded whole")
        assert starting_model(config, None, main=True).model == "loaded whole"
    assert [odd in record.message for record in caplog.records] == [True]
    other = starting_model(config, None, main=False)
    assert other.weights is None
    assert other.model.get_input_embeddings().weight.is_meta


def test_quantized_weights_are_read_whole(tmp_path: Path) -> None:
    folder = llada.CASES[0].write(tmp_path / "hub")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ModelSource, "load", lambda source: "loaded whole")
        assert starting_model(config_of(folder), None, main=True).model == "loaded whole"


def test_a_conversion_that_moves_elements_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed square matrix has the right shape; its rows are not the Hub's."""
    folder, real = llada.CASES[0].write(tmp_path / "hub"), lazy.hub_tensors

    def transposed(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = real(model, tensors)
        return {name: part.T.contiguous() if "q_proj" in name else part for name, part in found.items()}

    monkeypatch.setattr(lazy, "hub_tensors", transposed)
    assert starting_model(config_of(folder), None, main=False).weights is None


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = llada.CASES[0].write(tmp_path / "hub")
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    with refused(CheckpointError, file):
        starting_model(config_of(folder), None, main=True)
