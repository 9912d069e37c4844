"""Python callers can tell the kinds of errors apart: one provocation per class, through the public API."""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import dlm_bridge
from dlm_bridge import Bridge, Layout, errors
from dlm_bridge.cli.app import app
from dlm_bridge.convert import streaming
from dlm_bridge.evaluation.likelihood import Answer, likelihood_bounds
from dlm_bridge.registration import load
from tests.checkpoints import write_tokenizer


def existing_output(llada: Path, folder: Path, _: pytest.MonkeyPatch) -> None:
    Bridge.from_hf(llada).to_megatron(folder)


def too_many_ranks(llada: Path, folder: Path, _: pytest.MonkeyPatch) -> None:
    Bridge.from_hf(llada).to_megatron(folder / "out", Layout(tp=3))


def damaged_data(llada: Path, folder: Path, _: pytest.MonkeyPatch) -> None:
    (folder / "a.parquet").write_text("text")
    write_tokenizer(folder, {"tokenizer_class": "PreTrainedTokenizerFast"})
    words = ["preprocess", f"{folder}/a.parquet", "--output", f"{folder}/out", "--tokenizer", str(folder)]
    app(words, standalone_mode=False)


def no_checkpoint(llada: Path, folder: Path, _: pytest.MonkeyPatch) -> None:
    Bridge.from_hf(folder / "nothing")


def changed_tensors(llada: Path, folder: Path, _: pytest.MonkeyPatch) -> None:
    Bridge.from_hf(llada).to_megatron(folder / "m")
    file = max((folder / "m").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    Bridge.from_megatron(folder / "m").to_hf(folder / "out")


def unknown_engine(llada: Path, folder: Path, _: pytest.MonkeyPatch) -> None:
    load("engines", "quantum")


def full_disk(llada: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(streaming, "write_at", full)
    Bridge.from_hf(llada).to_megatron(folder / "out")


def killed_worker(llada: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    here, real = os.getpid(), streaming.write_at

    def write(*arguments: Any) -> None:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments)

    patch.setattr(streaming, "write_at", write)
    Bridge.from_hf(llada).to_megatron(folder / "out", processes=2, workers=1)


def mask_in_a_text(llada: Path, folder: Path, _: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(llada)
    mask = model.config.mask_token_id
    likelihood_bounds(model, [Answer((1, 2), (3,)), Answer((1, mask), (3,))], samples=1)


def nan_weights(llada: Path, folder: Path, _: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(llada)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = torch.nan
    model.generate(torch.tensor([[5, 6]]), gen_length=4, block_length=4, steps=2)


Provocation = Callable[[Path, Path, pytest.MonkeyPatch], None]
PROVOCATIONS: list[tuple[Provocation, type[errors.DlmBridgeError], str | None]] = [
    (existing_output, errors.SettingError, "output"),
    (too_many_ranks, errors.LayoutError, "tp"),
    (damaged_data, errors.InputFileError, "{folder}/a.parquet"),
    (no_checkpoint, errors.CheckpointError, "{folder}/nothing"),
    (changed_tensors, errors.ChangedTensorsError, "{folder}/m"),
    (unknown_engine, errors.MissingExtraError, "quantum"),
    (full_disk, errors.ResourceError, "{folder}/out"),
    (killed_worker, errors.WorkerError, None),
    (mask_in_a_text, errors.RowError, "row 1"),
    (nan_weights, errors.NonFiniteError, None),
]


@pytest.mark.parametrize(("provoke", "kind", "field"), PROVOCATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_kind_has_its_class(
    provoke: Provocation,
    kind: type[errors.DlmBridgeError],
    field: str | None,
    llada: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(errors.DlmBridgeError) as raised:
        provoke(llada, tmp_path, monkeypatch)
    error = raised.value
    assert type(error) is kind
    assert field is None or error.field == field.format(folder=tmp_path)
    assert "--" not in error.reason  # flags belong to the command line
    again = pickle.loads(pickle.dumps(error))  # errors of other processes are sent
    assert (type(again), again.field, again.reason) == (kind, error.field, error.reason)


def test_every_class_is_provoked_and_exported() -> None:
    declared = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ValueError)}
    assert {kind for _, kind, _ in PROVOCATIONS} | {errors.DlmBridgeError} == declared
    assert all(getattr(dlm_bridge, each.__name__) is each for each in declared)


def test_the_class_of_an_error_in_a_data_loaders_worker_is_kept() -> None:
    def collate(_: list[int]) -> None:
        raise errors.SettingError("generator", "gives every worker the same noise")

    with pytest.raises(errors.SettingError, match="every worker"):
        list(DataLoader([1, 2], collate_fn=collate, num_workers=1))  # type: ignore[arg-type]
