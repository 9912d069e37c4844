"""The model of a Hub folder: its family and config, whole files of weights, all weights in their places, and its
tokenizer. Every way to load a model finds them here, and every error calls the model what the user called it."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from dlm_bridge.convert.checkpoints.in_memory import keep_hub_names
from dlm_bridge.convert.formats.hub_weights import (
    BIN_FILE,
    BIN_INDEX,
    SAFETENSORS_INDEX,
    SINGLE_FILE,
)
from dlm_bridge.distributed import is_main
from dlm_bridge.errors import DlmBridgeError, first_of, one_line, printable
from dlm_bridge.files.pickles import check_torch_file, restricted_loading
from dlm_bridge.files.reading import check_plain_file, check_safetensors, opening
from dlm_bridge.hub import CONFIG_FILE, TRACKER, from_hub, read_config
from dlm_bridge.loading.placement import check_tensor_parallel_split
from dlm_bridge.mapping.dtypes import SAFETENSORS_DTYPES
from dlm_bridge.models.families import FamilySpec, class_names, families, find_family

logger = logging.getLogger(__name__)
# Keyword arguments with which `from_pretrained` looks for generation_config.json.
_ON_DISK: dict[str, Any] = {
    "cache_dir": None, "force_download": False, "proxies": None, "local_files_only": True, "token": None,
    "revision": "main", "subfolder": "",
}  # fmt: skip
# transformers' errors for a config without a model_type, and with an unknown one.
_UNKNOWN_TYPE = re.compile(r"^Unrecognized model|model type `")


def find_config(folder: Path, name: str, family: str | None = None) -> tuple[FamilySpec | None, Any]:
    """The family of a Hub folder's config.json, and the configuration object.

    The family is `family`, else the one that `architectures` names, else that of transformers' `model_type`; None for
    an autoregressive class of transformers without one. Raises DlmBridgeError, which calls the model `name`.
    """
    from transformers import AutoConfig

    import dlm_bridge  # noqa: F401  registers the families

    file = folder / CONFIG_FILE
    raw = read_config(file)
    spec = _named_family(raw, family, file)
    if spec is not None and family is None:
        _check_model_type(raw, spec, name)
    config_class = AutoConfig if spec is None else spec.load("config_class")
    with opening(folder, name, "its config does not load"):
        try:
            config = config_class.from_pretrained(folder, trust_remote_code=False, name_or_path=str(folder))
        except ValueError as error:
            if family is not None or not _UNKNOWN_TYPE.search(str(error)):
                raise
            raise DlmBridgeError(
                f"{name}: its config does not say which family it is: name it with --family "
                f"({one_line(error).split('. ')[0]})"
            ) from None
    if family is not None and not isinstance(config, config_class):
        raise DlmBridgeError(
            f"--family {family}: the config of {folder} names another family, {config.architectures[0]}: "
            "leave --family out"
        )
    return spec or getattr(type(config), "family", None), config


def _named_family(raw: dict[str, Any], family: str | None, file: Path) -> FamilySpec | None:
    """The family that a config.json's class names tell; None without names, and for an autoregressive class of
    transformers without a family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        return find_family(raw, family, where=str(file))
    except DlmBridgeError:
        named = next(iter(class_names(raw, str(file))), None)
        # A stock class name beside remote code may stand for what is not autoregressive at all.
        stock = named is None or named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        if family is None and not raw.get("auto_map") and stock:
            return None
        raise


def _check_model_type(raw: dict[str, Any], spec: FamilySpec, name: str) -> None:
    """Raise DlmBridgeError where a config's `model_type` is that of another model, which transformers would make."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = raw.get("model_type")
    if found in CONFIG_MAPPING_NAMES and found not in (spec.model_type, *spec.other_model_types):
        raise DlmBridgeError(
            f"{name}: config.json names {raw['architectures'][0]} and model_type {found!r}, which is another model's: "
            f"set model_type to {spec.model_type!r}"
        )


def load_hub_model(
    folder: Path,
    name: str,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    remedy: str = "",
    **arguments: Any,
) -> tuple[Any, FamilySpec | None]:
    """The model of a Hub folder with the weights there, and its family.

    Args:
        name: what the model is called in errors.
        family: name of the family, where the config does not say it.
        dtype: of the weights; None: that of most stored ones.
        remedy: for a folder without weights.
        arguments: further ones of `from_pretrained`.

    Raises:
        DlmBridgeError: a model that is damaged, is of no supported family, or cannot be sharded as asked.
    """
    from transformers import AutoModelForCausalLM

    spec, config = find_config(folder, name, family)
    check_weights(folder, name, remedy)
    if (distributed := arguments.get("distributed_config")) is not None:
        check_tensor_parallel_split(config, distributed.tp_size, name)
    model_class = AutoModelForCausalLM if spec is None else spec.load("model_class")
    arguments |= {"config": config, "dtype": dtype or _stored_dtype(folder)}
    return _load_pretrained(model_class, folder, name, **arguments), spec


def _load_pretrained(model_class: Any, folder: Path, name: str, **arguments: Any) -> Any:
    """`model_class.from_pretrained(folder, ...)`, with every parameter from the checkpoint: transformers' own classes
    leave others at random values and print a long report. Raises DlmBridgeError."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with opening(folder, name, "does not load"), restricted_loading():
            model, info = model_class.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
            )
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(info["missing_keys"]):
        raise DlmBridgeError(f"{name}: the checkpoint lacks {first_of(missing)}")
    if mismatched := sorted(info["mismatched_keys"]):
        tensor, found, wanted = mismatched[0]
        raise DlmBridgeError(
            f"{name}: {tensor} has shape {tuple(found)} in the checkpoint, {tuple(wanted)} by the config"
        )
    if unexpected := sorted(info["unexpected_keys"]):
        log_unused(name, unexpected)
    return model


def log_unused(name: str, tensors: list[str]) -> None:
    """Log, in the first process, a checkpoint's tensors that the model `name` has no place for."""
    if is_main():
        logger.warning(printable(f"{name}: the checkpoint has {first_of(tensors)}, which the model does not use"))


def check_exists(place: str, name: str) -> None:
    """Raise DlmBridgeError where `place` is neither a folder nor a Hub id, which has at most one slash and does not
    begin like a path."""
    looks_like_path = place.startswith((".", "/", "~")) or place.count("/") > 1
    if looks_like_path and not Path(place).is_dir():
        raise DlmBridgeError(f"{name}: no such folder")


def check_weights(folder: Path, name: str, remedy: str = "") -> None:
    """Raise DlmBridgeError where a folder lacks weights, or has a file of them that is damaged or missing."""
    files, single, index_file = sorted(folder.glob("*.safetensors")), SINGLE_FILE, SAFETENSORS_INDEX
    if not files and any(folder.glob("*.bin")):
        files, single, index_file = sorted(folder.glob("pytorch_model*.bin")), BIN_FILE, BIN_INDEX
    elif not files:
        raise DlmBridgeError(f"{name}: no weights there (*.safetensors){remedy}")
    for file in files:
        check_whole(file)
    index = folder / index_file
    if not index.is_file() or (folder / single).is_file():
        return
    shards = read_config(index).get("weight_map")
    names = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
    for shard in sorted(names):
        if not (folder / shard).is_file():
            raise DlmBridgeError(f"{name}: {shard}, which {index.name} names, is missing: fetch it again")


def check_whole(file: Path) -> None:
    """Raise DlmBridgeError for a file of weights, safetensors or torch's, that is truncated or damaged, by its header
    and its length, and for a pipe or a device in its place, which must not be opened."""
    check_plain_file(file)
    if file.suffix == ".bin":
        return check_torch_file(file, file)
    return check_safetensors(file)


def _stored_dtype(folder: Path) -> torch.dtype | str:
    """The dtype of most stored weights, whatever the config says; "auto", transformers' own choice, where a model
    cannot compute in it."""
    sizes: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                part = tensors.get_slice(name)
                sizes[part.get_dtype()] += prod(part.get_shape())
    return SAFETENSORS_DTYPES.get(sizes.most_common(1)[0][0], "auto") if sizes else "auto"


def load_tokenizer(place: str | os.PathLike[str], name: str, remedy: str = "") -> Any:
    """The tokenizer of a Hub folder or id, or of a Megatron checkpoint, called `name` in errors. Raises
    DlmBridgeError, with the `remedy` where there is no tokenizer."""
    from transformers import AutoTokenizer

    import dlm_bridge  # noqa: F401  registers the families' own

    def fetch(source: str | Path, local: bool) -> Any:
        with opening(source, name, "its tokenizer does not load", remedy):
            # False, not unset: transformers would ask on the terminal whether to run the folder's code.
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=local)

    check_exists(str(place), name)
    folder = Path(place)
    if folder.is_dir():
        return fetch(folder / "hf" if (folder / TRACKER).is_file() else folder, False)
    return from_hub(partial(fetch, str(place)), name, "its tokenizer")


def model_without_weights(model_class: Callable[[Any], Any], hub_config: Any, dtype: torch.dtype) -> Any:
    """The model in `dtype` with parameters on the meta device. Buffers, such as rotary frequencies, have values."""
    from accelerate import init_empty_weights

    hub_config = copy.deepcopy(hub_config)
    hub_config.dtype = dtype
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            model = model_class(hub_config)
    finally:
        torch.set_default_dtype(default)
    model.tie_weights()  # each has been given a parameter of its own
    keep_hub_names(model)
    return model


def read_generation_config(model: Any, folder: Path) -> None:
    """Give a model that was made without `from_pretrained` the generation_config.json of a Hub folder, if any."""
    if model.can_generate():
        model.adjust_generation_fn(None, False, False, str(folder), trust_remote_code=False, **_ON_DISK)


def model_family(model: Any) -> FamilySpec | None:
    """The family of a live model: its own, or that of its class, for transformers' own classes."""
    own: FamilySpec | None = getattr(model, "family", None)
    named = [
        spec
        for spec in families()
        if (spec.native or spec.kind == "autoregressive") and type(model).__name__ in spec.architectures
    ]
    return own or (named[0] if named else None)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hub model, sharded or not, by the class names in transformers' `_no_split_modules`."""
    names = {
        name
        for module in model.modules()
        if isinstance(listed := getattr(module, "_no_split_modules", None), list | tuple | set)
        for name in listed
    }
    # FSDP replaces a module's class by one whose name starts so.
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
