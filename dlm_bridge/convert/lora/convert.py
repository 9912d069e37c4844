"""Opening an adapter of either kind, and writing one as a PEFT folder."""

from __future__ import annotations

from pathlib import Path

from dlm_bridge.convert.atomic import atomic_output
from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.hub import read_config
from dlm_bridge.convert.lora.adapter import Adapter
from dlm_bridge.convert.lora.megatron_adapter import AdapterReport, MegatronAdapter, is_megatron_adapter
from dlm_bridge.convert.lora.peft_folder import CONFIG, PeftAdapter, is_peft_folder, write_peft_folder
from dlm_bridge.convert.tensors import dtype_name
from dlm_bridge.errors import DlmBridgeError


def open_adapter(path: Path, base: Checkpoint) -> Adapter:
    """A PEFT folder or a Megatron adapter checkpoint of `base`. Raises DlmBridgeError."""
    if is_peft_folder(path):
        return PeftAdapter(path, base)
    if is_megatron_adapter(path):
        return MegatronAdapter(path, base)
    raise DlmBridgeError(f"{path} is no adapter: it has neither an adapter_config.json nor Megatron adapter weights")


def named_base(path: Path) -> str:
    """The base that a PEFT folder names. Raises DlmBridgeError where it names none, or what is there is not one."""
    if not is_peft_folder(path):
        raise DlmBridgeError(f"{path}: does not name its base: give it with --base")
    named = read_config(path / CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise DlmBridgeError(f"{path / CONFIG}: names no base (base_model_name_or_path): give it with --base")
    return named


def export_adapter(adapter: Adapter, base: Checkpoint, output: Path, overwrite: bool = False) -> AdapterReport:
    """Write an adapter as a PEFT folder. Raises DlmBridgeError for a refused output."""
    facts = adapter.facts
    sources = [*base.folders(), *([facts.folder] if facts.folder else [])]
    with atomic_output(output, sources, overwrite) as folder:
        tensors = write_peft_folder(adapter, folder)
    parameters = sum(
        facts.rank * sum(base.spec(weight)[1]) for weight in facts.modules
    )  # [rank, columns] and [rows, rank]
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
