"""Loading of a Hub folder: family, config, weights and tokenizer. Used by every way to load a model.

`name` is the model as the user named it; errors have it as their field.
"""

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
from dlm_bridge.errors import CheckpointError, DlmBridgeError, SettingError, first_of, one_line, printable
from dlm_bridge.files.pickles import check_torch_file, restricted_loading
from dlm_bridge.files.reading import check_plain_file, check_safetensors, opening
from dlm_bridge.hub import CONFIG_FILE, TRACKER, from_hub, read_config
from dlm_bridge.loading.placement import check_tensor_parallel_split
from dlm_bridge.mapping.dtypes import SAFETENSORS_DTYPES
from dlm_bridge.models.families import FamilySpec, class_names, families, find_family

logger = logging.getLogger(__name__)
# Keyword arguments that `from_pretrained` uses to read generation_config.json.
_ON_DISK: dict[str, Any] = {
    "cache_dir": None, "force_download": False, "proxies": None, "local_files_only": True, "token": None,
    "revision": "main", "subfolder": "",
}  # fmt: skip
# transformers' errors for a config without a model_type, or with an unknown one.
_UNKNOWN_TYPE = re.compile(r"^Unrecognized model|model type `")


def find_config(folder: Path, name: str, family: str | None = None) -> tuple[FamilySpec | None, Any]:
    """Find the family of a Hub folder's config.json, and create the configuration object.

    The family is `family`, else that of `architectures`, else that of transformers' `model_type`; None for an
    autoregressive class of transformers without a family.

    Raises:
        CheckpointError: the config is damaged, or does not identify a supported family.
        SettingError: the config is not of the family `family`.
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
            cause = one_line(error).split(". ")[0]
            raise CheckpointError(name, f"its config does not identify the family: set `family` ({cause})") from None
    if family is not None and not isinstance(config, config_class):
        raise SettingError("family", f"{family} is not that of {folder}, which is {config.architectures[0]}")
    return spec or getattr(type(config), "family", None), config


def _named_family(raw: dict[str, Any], family: str | None, file: Path) -> FamilySpec | None:
    """Family that a config.json's class names identify; None without names, and for an autoregressive class of
    transformers without a family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        return find_family(raw, family, where=str(file))
    except DlmBridgeError:
        named = next(iter(class_names(raw, str(file))), None)
        # Remote code may use a stock class name for a model that is not autoregressive.
        stock = named is None or named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        if family is None and not raw.get("auto_map") and stock:
            return None
        raise


def _check_model_type(raw: dict[str, Any], spec: FamilySpec, name: str) -> None:
    """Raise CheckpointError if a config's `model_type` is another model's, which transformers would create."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = raw.get("model_type")
    if found in CONFIG_MAPPING_NAMES and found not in (spec.model_type, *spec.other_model_types):
        raise CheckpointError(
            name,
            f"config.json has {raw['architectures'][0]} and model_type {found!r}, which is another model's: set "
            f"model_type to {spec.model_type!r}",
        )


def load_hub_model(
    folder: Path,
    name: str,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    remedy: str = "",
    **arguments: Any,
) -> tuple[Any, FamilySpec | None]:
    """Load the model of a Hub folder; returns it with its family.

    Args:
        family: name of the family, if the config does not identify it.
        dtype: dtype of the weights; None: that of most stored weights.
        remedy: end of the error for a folder without weights.
        arguments: further arguments of `from_pretrained`.

    Raises:
        CheckpointError: the model is damaged or of an unsupported family.
        SettingError: the model is not of the family `family`.
        LayoutError: the model cannot be sharded over the processes.
    """
    from transformers import AutoModelForCausalLM

    spec, config = find_config(folder, name, family)
    check_weights(folder, name, remedy)
    if (distributed := arguments.get("distributed_config")) is not None:
        check_tensor_parallel_split(config, distributed.tp_size)
    model_class = AutoModelForCausalLM if spec is None else spec.load("model_class")
    arguments |= {"config": config, "dtype": dtype or _stored_dtype(folder)}
    return _load_pretrained(model_class, folder, name, **arguments), spec


def _load_pretrained(model_class: Any, folder: Path, name: str, **arguments: Any) -> Any:
    """Call `model_class.from_pretrained(folder, ...)`. Raises CheckpointError for a parameter that is not in the
    checkpoint, which transformers would initialise at random."""
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
    problems = [f"{tensor} is missing" for tensor in sorted(info["missing_keys"])] + [
        f"{tensor} has shape {tuple(found)} in the checkpoint, {tuple(wanted)} by the config"
        for tensor, found, wanted in sorted(info["mismatched_keys"])
    ]
    if problems:
        raise CheckpointError(name, first_of(problems))
    if unexpected := sorted(info["unexpected_keys"]):
        log_unused(name, unexpected)
    return model


def log_unused(name: str, tensors: list[str]) -> None:
    """Log, in the main process, a checkpoint's tensors that the model does not use."""
    if is_main():
        logger.warning(printable(f"{name}: the checkpoint has {first_of(tensors)}, which the model does not use"))


def check_exists(place: str) -> None:
    """Raise CheckpointError if `place` looks like a path (not like a Hub id), and is not a folder."""
    looks_like_path = place.startswith((".", "/", "~")) or place.count("/") > 1
    if looks_like_path and not Path(place).is_dir():
        raise CheckpointError(place, "no such folder")


def check_weights(folder: Path, name: str, remedy: str = "") -> None:
    """Raise CheckpointError for a folder without weights, or with a file of weights that is damaged or missing."""
    files, single, index_file = sorted(folder.glob("*.safetensors")), SINGLE_FILE, SAFETENSORS_INDEX
    if not files and any(folder.glob("*.bin")):
        files, single, index_file = sorted(folder.glob("pytorch_model*.bin")), BIN_FILE, BIN_INDEX
    elif not files:
        raise CheckpointError(name, f"no weights there (*.safetensors){remedy}")
    for file in files:
        check_whole(file)
    index = folder / index_file
    if not index.is_file() or (folder / single).is_file():
        return
    shards = read_config(index).get("weight_map")
    names = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
    for shard in sorted(names):
        if not (folder / shard).is_file():
            raise CheckpointError(name, f"{shard}, listed in {index.name}, is missing: download it again")


def check_whole(file: Path) -> None:
    """Raise CheckpointError for a file of weights (safetensors or torch.save) that is truncated or damaged, judged by
    its header and length, and for a pipe or a device, which is not opened."""
    check_plain_file(file)
    if file.suffix == ".bin":
        return check_torch_file(file, file)
    return check_safetensors(file)


def _stored_dtype(folder: Path) -> torch.dtype | str:
    """Dtype of most stored weights, whatever the config says; "auto" (transformers' choice) if models cannot compute
    in it."""
    sizes: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                part = tensors.get_slice(name)
                sizes[part.get_dtype()] += prod(part.get_shape())
    return SAFETENSORS_DTYPES.get(sizes.most_common(1)[0][0], "auto") if sizes else "auto"


def load_tokenizer(place: str | os.PathLike[str], name: str | None = None, remedy: str = "") -> Any:
    """Load the tokenizer of a Hub folder or id, or of a Megatron checkpoint. Raises CheckpointError for `name`
    (default: `place`), with `remedy` at the end of its line."""
    from transformers import AutoTokenizer

    import dlm_bridge  # noqa: F401  registers the families' tokenizers

    name = str(place) if name is None else name

    def fetch(source: str | Path, local: bool) -> Any:
        with opening(source, name, "its tokenizer does not load", remedy):
            # False, not unset: transformers would ask on the terminal whether to run the folder's code.
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=local)

    check_exists(str(place))
    folder = Path(place)
    if folder.is_dir():
        return fetch(folder / "hf" if (folder / TRACKER).is_file() else folder, False)
    return from_hub(partial(fetch, str(place)), name, "its tokenizer")


def model_without_weights(model_class: Callable[[Any], Any], hub_config: Any, dtype: torch.dtype) -> Any:
    """Create the model in `dtype` with parameters on the meta device. Buffers, such as rotary frequencies, have
    values."""
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
    model.tie_weights()  # init_empty_weights has untied them
    keep_hub_names(model)
    return model


def read_generation_config(model: Any, folder: Path) -> None:
    """Read a Hub folder's generation_config.json, if any, for a model created without `from_pretrained`."""
    if model.can_generate():
        model.adjust_generation_fn(None, False, False, str(folder), trust_remote_code=False, **_ON_DISK)


def model_family(model: Any) -> FamilySpec | None:
    """Family of a live model, also of transformers' own classes; None if unknown."""
    own: FamilySpec | None = getattr(model, "family", None)
    named = [
        spec
        for spec in families()
        if (spec.native or spec.kind == "autoregressive") and type(model).__name__ in spec.architectures
    ]
    return own or (named[0] if named else None)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Decoder layers of a Hub model, sharded or not, by the class names in transformers' `_no_split_modules`."""
    names = {
        name
        for module in model.modules()
        if isinstance(listed := getattr(module, "_no_split_modules", None), list | tuple | set)
        for name in listed
    }
    # FSDP replaces a module's class by one with this prefix.
    return [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
