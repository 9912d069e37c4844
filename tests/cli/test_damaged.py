"""Damaged folders under the commands that load models: one DlmBridgeError that names the file, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dlm_bridge import Bridge
from dlm_bridge.data.documents import parse_object
from dlm_bridge.errors import CheckpointError, DlmBridgeError, InputFileError
from dlm_bridge.files.reading import reading
from dlm_bridge.generation.prompts import read_prompts
from dlm_bridge.loading import load_model
from dlm_bridge.loading.pretrained import load_tokenizer
from dlm_bridge.loading.source import ModelSource
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.files import read_run_config
from dlm_bridge.train.lora import add_adapter
from dlm_bridge.train.metrics import plot_loss, read_rows
from dlm_bridge.train.setup import model_source
from tests.cli.conftest import Cli
from tests.convert.helpers import run_cli
from tests.refusals import refused

Damage = Callable[[Path], Any]


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def nest(path: Path) -> None:
    path.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")


def nest_less(path: Path) -> None:
    """So deep that it parses, and exhausts the stack when it is copied."""
    change(path, odd=json.loads("[" * 900 + "]" * 900))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def copy(qwen3: Path, tmp_path: Path) -> Path:
    return shutil.copytree(qwen3, tmp_path / "copy")


@pytest.fixture
def adapter(qwen3: Path, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(qwen3)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


OF_A_MODEL: dict[str, tuple[str, Damage]] = {
    "truncated weights": ("model.safetensors", halve),
    "weights in a pipe": ("model.safetensors", pipe),
    "weights from a device": ("model.safetensors", device),
    "a bomb of JSON": ("config.json", nest),
    "a config that is nested too deep": ("config.json", nest_less),
    "generation settings in a pipe": ("generation_config.json", pipe),
    "generation settings that are a bomb": ("generation_config.json", nest),
}


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_a_damaged_model_is_named_by_every_loader(copy: Path, name: str) -> None:
    file, damage = OF_A_MODEL[name]
    damage(copy / file)
    config = TrainConfig.from_flags(model=str(copy), data=["x"], output="y")
    loaders = [load_model, lambda folder: ModelSource(str(folder)).load()]
    if file == "model.safetensors":
        loaders.append(lambda _: model_source(config).empty())
    for load in loaders:
        with pytest.raises(DlmBridgeError, match=file):
            load(copy)


@pytest.mark.extension("plan")
@pytest.mark.parametrize("damage", [halve, pipe, Path.unlink], ids=lambda damage: damage.__name__)
def test_a_dry_run_names_damaged_pickled_weights(copy: Path, damage: Damage) -> None:
    from dlm_bridge.plan.dry_run import dry_run

    pickle_weights(copy)
    config = TrainConfig.from_flags(model=str(copy), data=["mock"], output="y", seq_length=32)
    dry_run(config)
    damage(copy / "pytorch_model-00002-of-00002.bin")
    with refused(CheckpointError, None, "pytorch_model-00002-of-00002"):
        dry_run(config)


@pytest.mark.extension("plan")
def test_pickled_weights_of_torch_before_1_6_are_refused(copy: Path) -> None:
    """They have no archive whose records can be checked before anything is read."""
    from dlm_bridge.plan.dry_run import dry_run

    pickle_weights(copy, _use_new_zipfile_serialization=False)
    with refused(CheckpointError, copy / "pytorch_model-00001-of-00002.bin", "torch >= 1.6"):
        dry_run(TrainConfig.from_flags(model=str(copy), data=["mock"], output="y", seq_length=32))


def pickle_weights(folder: Path, **options: Any) -> None:
    """Put the weights into two of torch's files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"pytorch_model-0000{place % 2 + 1}-of-00002.bin" for place, name in enumerate(tensors)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    for file in set(names.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if names[name] == file}, folder / file, **options)


def test_sizes_that_do_not_fit_name_the_tensor(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(copy / "config.json", intermediate_size=64)
    for load in (load_model, lambda folder: ModelSource(str(folder)).load()):
        with pytest.raises(DlmBridgeError, match=r"gate_proj|up_proj|down_proj"):
            load(copy)
    assert "\x1b" not in capfd.readouterr().err


@pytest.mark.parametrize("value", ["many", -1, [2], None, 10**30])
def test_odd_sizes_in_a_config(copy: Path, value: Any) -> None:
    change(copy / "config.json", num_attention_heads=value)
    config = TrainConfig.from_flags(model=str(copy), data=["x"], output="y")
    for load in (load_model, lambda folder: ModelSource(str(folder)).load(), lambda _: model_source(config).empty()):
        with pytest.raises(DlmBridgeError, match=str(copy)):
            load(copy)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", [halve, pipe, device, nest])
def test_a_damaged_tokenizer_is_named(copy: Path, file: str, damage: Damage) -> None:
    damage(copy / file)
    with pytest.raises(DlmBridgeError, match=file):
        load_tokenizer(copy, "the model")


def test_an_odd_value_in_a_tokenizer(copy: Path) -> None:
    change(copy / "tokenizer.json", padding={"strategy": {"Fixed": 1e308}})
    with refused(CheckpointError, "the model"):
        load_tokenizer(copy, "the model")


@pytest.mark.parametrize("damage", [halve, pipe, device])
def test_a_damaged_adapter_is_named(qwen3: Path, adapter: Path, damage: Damage) -> None:
    damage(adapter / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(qwen3)
    config = TrainConfig.from_flags(model=str(qwen3), data=["x"], output="y", adapter=str(adapter))
    for load in (load_model, lambda folder: add_adapter(config, model, folder)):
        with refused(CheckpointError, None, "adapter_model.safetensors"):
            load(adapter)


@pytest.mark.parametrize("values", [{"num_hidden_layers": 2**31}, {"architectures": 5}, {"architectures": [[]]}])
def test_a_config_of_impossible_values_is_named_by_every_loader(copy: Path, values: dict[str, Any]) -> None:
    change(copy / "config.json", **values)
    config = TrainConfig.from_flags(model=str(copy), data=["x"], output="y")
    for load in (load_model, lambda folder: ModelSource(str(folder)).load(), lambda _: model_source(config).empty()):
        with pytest.raises(DlmBridgeError, match=r"config\.json|num_hidden_layers"):
            load(copy)


def test_a_model_of_one_position_is_not_evaluated(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copy / "config.json", max_position_embeddings=1)
    (tmp_path / "text").write_text("some words")
    code, _, err = run_cli(capsys, "eval", copy, "--perplexity", tmp_path / "text")
    assert (code, "config.json" in err) == (2, True), err


def test_a_manifest_of_other_types(qwen3: Path, tmp_path: Path) -> None:
    Bridge.from_hf(qwen3).to_megatron(tmp_path / "m")
    for name, value in (("carried", -1), ("left_out", {}), ("layout", []), ("shards", [{}]), ("files", {"a": 1})):
        text = (tmp_path / "m" / "dlm_bridge.json").read_text()
        change(tmp_path / "m" / "dlm_bridge.json", **{name: value})
        with pytest.raises(DlmBridgeError, match=r"dlm_bridge\.json"):
            Bridge.from_megatron(tmp_path / "m")
        (tmp_path / "m" / "dlm_bridge.json").write_text(text)


def test_no_pipe_in_a_megatron_checkpoint_is_waited_for(qwen3: Path, tmp_path: Path) -> None:
    Bridge.from_hf(qwen3).to_megatron(tmp_path / "m")
    pipe(tmp_path / "m" / "iter_0000000" / ".metadata")
    with refused(CheckpointError, tmp_path / "m" / "iter_0000000" / ".metadata"):
        Bridge.from_megatron(tmp_path / "m")


BOMB = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
LONG_NUMBER = b'{"prompt": ' + b"1" * 10_000 + b"}"  # beyond Python's limit of digits
HALF = rb'{"prompt": "a\ud800"}'  # of a character


@pytest.mark.parametrize("line", [BOMB, LONG_NUMBER, HALF])
def test_bombs_in_data_are_named_by_their_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with refused(InputFileError, f"{tmp_path}/rows.jsonl:2"):
        read_prompts(str(tmp_path / "rows.jsonl"), "prompt", False, None)
    with refused(InputFileError, "the row"):
        parse_object(line, "the row")


def test_both_halves_of_a_character_are_one() -> None:
    assert parse_object(rb'{"prompt": "\ud83d\ude00"}', "the row") == {"prompt": "\N{GRINNING FACE}"}


def test_a_bomb_in_a_run_s_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: " + "[" * 5000 + "]" * 5000)
    with pytest.raises(DlmBridgeError, match=r"config\.yaml"):
        read_run_config(tmp_path / "config.yaml")


def test_damaged_metrics_are_left_out_alone(tmp_path: Path) -> None:
    sound = '{"step": 1, "loss": 2.5}\n'
    for damage in (BOMB, LONG_NUMBER, b"[]", b'{"loss": 1}', b'{"step": "2", "loss": 1}', b"\xff\xfe"):
        (tmp_path / "metrics.jsonl").write_bytes(sound.encode() + damage + b"\n" + sound.encode())
        assert read_rows(tmp_path / "metrics.jsonl") == [json.loads(sound)] * 2
    (tmp_path / "$^$\udcff").mkdir()
    plot_loss([{"step": 1, "loss": 2.5}, {"step": 2}, {"step": 3, "loss": "4"}], tmp_path / "$^$\udcff" / "loss.png")


def test_names_cannot_drive_a_terminal(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli(tmp_path / "no\x1b[2J\udcff", "--prompt", "a")
    assert code == 2
    assert "\\x1b[2J\\udcff" in err
    assert "\x1b" not in err


def test_long_messages_keep_their_ends() -> None:
    message = str(CheckpointError("config.json", f"{'x' * 100_000}: remove it"))
    assert len(message) < 2000
    assert message.startswith("config.json: xxx")
    assert message.endswith("xxx: remove it")


def test_only_what_reads_a_file_is_guarded() -> None:
    class PanicException(BaseException):
        pass

    for raised in (TypeError("a"), RecursionError(), MemoryError(), PanicException("b")):
        with refused(InputFileError, "a file", "not a table"), reading("a file", "not a table", kind=InputFileError):
            raise raised
    for passed in (KeyboardInterrupt, SystemExit):
        with pytest.raises(passed), reading("a file", "not a table"):
            raise passed


class Code:
    """What a pickled file could hold in the place of weights."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def test_nobody_is_advised_to_run_what_is_pickled(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Code()}, copy / "pytorch_model.bin")
    with pytest.raises(DlmBridgeError, match=str(copy)) as raised:
        load_model(copy)
    assert "weights_only" not in str(raised.value)
