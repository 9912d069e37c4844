"""Model loading from any folder: `load_model` for sampling (with tokenizer and adapter), `ModelSource` for training.

`pretrained` finds the family, config, weights and tokenizer of a Hub folder, `lazy` reads weights by ranges of
elements, and `placement` assigns weights to devices.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.convert.checkpoints import is_megatron, open_checkpoint
from dlm_bridge.convert.lora import export_adapter, named_base, open_adapter
from dlm_bridge.convert.lora.mask_only import key_is_known, mask_only_token, restrict_to_masks
from dlm_bridge.convert.lora.megatron import ADAPTER_MANIFEST
from dlm_bridge.distributed import from_all, is_main, local_rank, raised_everywhere, world_size
from dlm_bridge.errors import LayoutError, SettingError, printable
from dlm_bridge.files.atomic import temporary_folder
from dlm_bridge.files.pickles import restricted_loading
from dlm_bridge.files.reading import opening
from dlm_bridge.generation.settings import refuse_prompt_learning
from dlm_bridge.hub import ADAPTER_CONFIG, CONFIG_FILE, checkpoint_folder, quantization_method, resolve
from dlm_bridge.job import start_process_group
from dlm_bridge.loading.placement import Placement, join_replicas
from dlm_bridge.loading.pretrained import load_hub_model, load_tokenizer
from dlm_bridge.mapping.dtypes import parse_dtype
from dlm_bridge.models.special_tokens import align_special_tokens
from dlm_bridge.registration import load
from dlm_bridge.settings import QUANTIZE, check_choice
from dlm_bridge.terminal import loading

__all__ = ["LoadedModel", "Placement", "join_replicas", "load_model"]
logger = logging.getLogger(__name__)
QUANTIZED = ("compressed-tensors", "fp8")  # values of `quant_method` that dlm_bridge.exports loads


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode and its tokenizer.

    Args:
        family: name of the family; class name of an autoregressive model without a family.
        diffusion: True if dlm_bridge samples and scores it as a diffusion model. Other models, including
            DiffusionGemma, are sampled by transformers' own `generate`.
    """

    model: Any
    tokenizer: Any
    family: str
    diffusion: bool


def load_model(
    place: str | os.PathLike[str],
    placement: Placement | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    family: str | None = None,
    revision: str | None = None,
    like: str | None = None,
    tokenizer: str | None = None,
    quantize: str | None = None,
) -> LoadedModel:
    """Load a diffusion or autoregressive model for sampling.

    Args:
        place: Hub folder or id; Megatron checkpoint of any format; adapter (PEFT folder or Megatron's), loaded on the
            base that it or its run names; or folder of a training run, whose newest checkpoint is loaded.
        placement: devices of the model.
        dtype: "keep" (also None: the stored dtype), "bf16", "fp16", "fp32" or a torch dtype.
        family: the model family, if the config does not identify it.
        revision: branch, tag or commit of a Hub id.
        like: Hub model of a Megatron checkpoint, or base of an adapter, that was not written by dlm-bridge.
        tokenizer: folder or id of another tokenizer.
        quantize: quantise the linear layers as they are read: "fp8", "int8" or "int4".

    Raises:
        CheckpointError: `place` has no model that can be sampled from, or no tokenizer.
        SettingError: a setting is invalid or does not apply to `place`.
        LayoutError: the model or the number of processes does not fit `placement`.
        MissingExtraError: the machine does not have the devices of `placement`.
    """
    if quantize is not None:
        check_choice("quantize", quantize, QUANTIZE)
        load("features", "quantized weights")  # refused before anything is read
    with loading(os.fspath(place)):
        return _load(place, placement, dtype, family, revision, like, tokenizer, quantize)


def _load(
    place: str | os.PathLike[str],
    placement: Placement | None,
    dtype: str | torch.dtype | None,
    family: str | None,
    revision: str | None,
    like: str | None,
    tokenizer: str | None,
    quantize: str | None,
) -> LoadedModel:
    where = (placement or Placement()).arguments()
    wanted = parse_dtype(dtype)
    path = checkpoint_folder(place)
    if path.is_dir() and is_megatron(path):
        resolve(path, revision)  # refuses a revision of a local folder
        base = (like or named_base(path)) if (path / ADAPTER_MANIFEST).is_file() else None
        with _exported(path, like, family, base) as folder:
            if base is not None:
                return _load_adapter(folder, str(path), base, placement, dtype, family, tokenizer, quantize)
            return _load_folder(folder, where, wanted, family, str(path), tokenizer, quantize)
    if like is not None:
        raise SettingError("like", f"{like} is for Megatron checkpoints, and {path} is not one")
    folder = resolve(path, revision)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG_FILE).is_file():
        base = named_base(folder)
        return _load_adapter(folder, str(folder), base, placement, dtype, family, tokenizer, quantize)
    return _load_folder(folder, where, wanted, family, os.fspath(path), tokenizer, quantize)


def _load_folder(
    folder: Path,
    where: dict[str, Any],
    dtype: torch.dtype | None,
    family: str | None,
    name: str,
    tokenizer: str | None,
    quantize: str | None,
) -> LoadedModel:
    loaded = load_tokenizer(tokenizer) if tokenizer else load_tokenizer(folder, name, ": set `tokenizer`")
    if quantize is not None or quantization_method(folder) in QUANTIZED:
        load_quantized = load("features", "quantized weights")
        model, spec = load_quantized(folder, name, family, dtype, quantize, **where)
    else:
        model, spec = load_hub_model(folder, name, family, dtype, **where)
    if "distributed_config" in where:
        from dlm_bridge.generation.runtime.tensor_parallel import use_plain_shards

        use_plain_shards(model)
    align_special_tokens(model, loaded, name)
    note = precision_note(name, model.dtype, model.device.type) if dtype is None else None
    if note is not None and is_main():
        logger.warning(note)
    return LoadedModel(
        model=model.eval(),
        tokenizer=loaded,
        family=type(model).__name__ if spec is None else spec.name,
        diffusion=spec is not None and spec.sampled_here,
    )


def precision_note(name: str, dtype: torch.dtype, device: str) -> str | None:
    """Note about sampling in fp32 on a GPU; None for other dtypes and devices."""
    if device != "cuda" or dtype != torch.float32:
        return None
    return printable(
        f"{name}: weights and computation are fp32, the precision that training saves: `dtype=bf16` is several times "
        "faster on a GPU"
    )


def _load_adapter(
    folder: Path,
    name: str,
    base: str,
    placement: Placement | None,
    dtype: str | torch.dtype | None,
    family: str | None,
    tokenizer: str | None,
    quantize: str | None,
) -> LoadedModel:
    """Load a PEFT adapter on its base model. `name`: the adapter's name in errors."""
    from peft import PeftConfig, PeftModel

    if quantize is not None:
        raise SettingError("quantize", f"does not support adapters: merge {name} first (dlm-bridge adapter export)")
    if placement is not None and placement.tensor_parallel:
        reason = f"does not support adapters: merge {name} first (dlm-bridge adapter export)"
        raise LayoutError(placement.tp_setting, reason)
    with opening(folder, name, f"is not an adapter of {base}"), key_is_known():
        adapter = PeftConfig.from_pretrained(str(folder))
    refuse_prompt_learning(adapter, name)
    own = folder if tokenizer is None and (folder / "tokenizer_config.json").is_file() else tokenizer
    opened = load_model(base, placement, dtype=dtype, family=family, tokenizer=None if own is None else str(own))
    token = mask_only_token(folder)
    with opening(folder, name, f"is not an adapter of {base}"), key_is_known(), restricted_loading():
        model = PeftModel.from_pretrained(opened.model, str(folder))
        if token is not None:
            restrict_to_masks(model, token)
    return replace(opened, model=model.eval())


@contextmanager
def _exported(root: Path, like: str | None, family: str | None, base: str | None) -> Iterator[Path]:
    """Context manager: export a Megatron checkpoint to a temporary Hub folder, or an adapter of `base` to a temporary
    PEFT folder. One process exports, all processes use the folder."""
    from dlm_bridge.bridge import Bridge

    def export(folder: Path) -> None:
        if base is not None:
            checkpoint = open_checkpoint(base, family=family)
            export_adapter(open_adapter(root, checkpoint), checkpoint, folder / "hub")
            return
        Bridge.from_megatron(root, like=like, family=family).to_hf(folder / "hub")

    if world_size() == 1:
        with temporary_folder() as folder:
            export(folder)
            yield folder / "hub"
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu and not dist.is_initialized():
        torch.cuda.set_device(local_rank() or 0)
    start_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")  # as transformers does for tensor parallelism
    with temporary_folder() as own:
        with raised_everywhere():
            if is_main():
                export(own)
        yield from_all(own)[0] / "hub"
        dist.barrier()  # the first process removes what the others read
