"""LoRA adapters: open a PEFT folder or Megatron adapter weights, export a PEFT folder, merge."""

from __future__ import annotations

from pathlib import Path

import torch

from dlm_bridge.convert.card import CARD, folder_card, training_run
from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.lora.megatron import (
    ADAPTER_MANIFEST,
    AdapterReport,
    MegatronAdapter,
    is_megatron_adapter,
    read_adapter_manifest,
)
from dlm_bridge.convert.lora.peft import (
    LoraAdapter,
    PeftAdapter,
    factor_parameters,
    is_peft_folder,
    write_peft_folder,
)
from dlm_bridge.convert.manifest import ChangedFile, Manifest, TensorRecord, record_of
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.files.atomic import atomic_output
from dlm_bridge.hub import ADAPTER_CONFIG, read_config
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.rules import ParamMapping


def open_adapter(path: Path, base: Checkpoint) -> LoraAdapter:
    """Open a PEFT folder or a Megatron adapter checkpoint of `base`. Raises CheckpointError."""
    if is_peft_folder(path):
        return PeftAdapter(path, base)
    if is_megatron_adapter(path):
        return MegatronAdapter(path, base)
    raise CheckpointError(path, f"is not an adapter: it has neither {ADAPTER_CONFIG} nor Megatron adapter weights")


def named_base(path: Path) -> str:
    """Base model by a PEFT folder's adapter_config.json, a training run's config.yaml, or an adapter's manifest.

    Raises:
        SettingError: they do not name it.
    """
    if is_peft_folder(path):
        file, named = ADAPTER_CONFIG, read_config(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    else:
        file, manifest, run = ADAPTER_MANIFEST, read_adapter_manifest(path), training_run(path)
        named = (run or {}).get("config", {}).get("model") or ((manifest or {}).get("base") or {}).get("name")
    if not isinstance(named, str) or not named:
        raise SettingError(
            "base", f"{path} does not name its base model in {file}: name it (dlm-bridge adapter export)"
        )
    return named


def export_adapter(
    adapter: LoraAdapter, base: Checkpoint, output: Path, overwrite: bool = False, accept_changed_tensors: bool = False
) -> AdapterReport:
    """Write an adapter as a PEFT folder.

    Raises:
        SettingError: the output exists, or lies inside a source.
        ChangedTensorsError: the adapter differs from its recorded digests and `accept_changed_tensors` is not set.
    """
    facts = adapter.facts
    adapter.check_unchanged(accept_changed_tensors)
    sources = [*base.folders(), *([facts.folder] if facts.folder else [])]
    with atomic_output(output, sources, overwrite) as folder:
        tensors = write_peft_folder(adapter, base, folder)
        if not (folder / CARD).exists():
            card = folder_card(base.family, None, read_config(folder / ADAPTER_CONFIG))
            (folder / CARD).write_text(card, "utf-8")
    parameters = factor_parameters(base, facts.modules, facts.rank, facts.dora)
    return AdapterReport(
        source=facts.where,
        output=str(output),
        base=base.where,
        style=adapter.style if isinstance(adapter, MegatronAdapter) else "PEFT",
        rank=facts.rank,
        alpha=facts.alpha,
        tensors=tensors,
        parameters=parameters,
        dtype=dtype_name(facts.dtype),
    )


class MergedCheckpoint(Checkpoint):
    """The base model with the adapter merged into the weights that it changes."""

    format = "merged"

    def __init__(self, base: Checkpoint, adapter: LoraAdapter) -> None:
        super().__init__(base.where, base.hub)
        self.dims, self.passthrough = base.dims, base.passthrough
        self._base, self._adapter = base, adapter
        self._stored: dict[str, TensorRecord] = {}

    @property
    def derived(self) -> dict[str, str]:
        return self._base.derived

    def has(self, param: ParamMapping) -> bool:
        return self._base.has(param)

    def spec(self, name: str) -> TensorSpec:
        return self._base.spec(name)

    def read_param(self, param: ParamMapping) -> tuple[torch.Tensor, ...]:
        tensors = self._base.read_param(param)
        return tuple(self._merged(name, tensor) for name, tensor in zip(param.hub_names, tensors, strict=True))

    def read_passthrough(self, name: str) -> torch.Tensor:
        return self._merged(name, self._base.read_passthrough(name), self.passthrough[name].copy_of)

    def check(self) -> list[str]:
        changed = len(self._adapter.facts.modules)
        return [*self._base.check(), f"the adapter {self._adapter.facts.where} is merged into {changed} weights"]

    @property
    def record(self) -> Manifest | None:
        return self._base.record

    def stored_record(self, name: str) -> TensorRecord | None:
        return self._stored.pop(name, None)

    def damaged_files(self, workers: int | None = None) -> list[ChangedFile]:
        return [*self._base.damaged_files(workers), *self._adapter.changed()]

    def folders(self) -> list[Path]:
        own = self._adapter.facts.folder
        return [*self._base.folders(), *([own] if own else [])]

    def _merged(self, name: str, tensor: torch.Tensor, copy_of: str = "") -> torch.Tensor:
        weight = copy_of or name
        if weight not in self._adapter.facts.modules:
            return tensor
        self._stored[name] = record_of(tensor)
        return self._adapter.merged(weight, tensor).to(tensor.dtype)
