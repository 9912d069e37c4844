"""Loading the model and the tokenizer that `--model` and `--tokenizer` name, for both engines."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlm_bridge import loading
from dlm_bridge.bridge import Bridge
from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.huggingface import HubCheckpoint
from dlm_bridge.convert.checkpoints.in_memory import keep_hub_names, stored_tensors
from dlm_bridge.convert.formats.hub_weights import BIN_FILE, BIN_INDEX, SAFETENSORS_INDEX, SINGLE_FILE
from dlm_bridge.data.chat_template import set_chat_template
from dlm_bridge.errors import DlmBridgeError, one_line, printable, reading
from dlm_bridge.hub import CONFIG_FILE, HUB_ID, TRACKER, from_hub, opening, read_config, resolve
from dlm_bridge.models.families import FamilySpec, class_names, families, family_by_name, find_family
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.lazy_weights import LazyWeights, NotInRangesError

logger = logging.getLogger(__name__)
# Keyword arguments with which `from_pretrained` looks for generation_config.json.
_ON_DISK: dict[str, Any] = {
    "cache_dir": None, "force_download": False, "proxies": None, "local_files_only": True, "token": None,
    "revision": "main", "subfolder": "",
}  # fmt: skip
# transformers' errors for a config without a model_type, and with an unknown one.
_UNKNOWN_TYPE = re.compile(r"^Unrecognized model|model type `")


def load_model(config: TrainConfig) -> Any:
    """The PreTrainedModel that `--model` names: a Hub folder or id, a Megatron checkpoint, or with `--from-scratch` a
    config.json, of the family that `--family` or the config names. In fp32; the frozen base of an adapter in the run's
    precision, or quantized. Raises DlmBridgeError."""
    model = _load(config)
    if config.model.mask_token_id is not None:
        model.config.mask_token_id = config.model.mask_token_id  # saved with every checkpoint
    return model


@dataclass(frozen=True)
class StartingModel:
    """The model that a run starts with.

    Args:
        model: with its weights; with `weights` on the meta device, apart from computed buffers. Where FSDP cannot read
            a checkpoint in parts, it has its weights in the main process and is on the meta device in the others.
        weights: of which every process reads its own parts; None: `model` has them.
    """

    model: Any
    weights: LazyWeights | None = None


def starting_model(config: TrainConfig, checkpoint: Path | None, main: bool) -> StartingModel:
    """The model that a run starts with: that of `--model`, or on a resume that of the run's own `checkpoint`; with an
    adapter always the base model of `--model`. Under FSDP no process loads it whole, unless the checkpoint's tensors
    cannot be read in parts: then the `main` process does and logs why. Raises DlmBridgeError."""
    if checkpoint is not None and not config.model.adapts:
        config = config.replace(model=str(checkpoint), from_scratch=False)
    if not config.parallel.shards:
        return StartingModel(load_model(config))
    try:
        return _lazy_model(config)
    except NotInRangesError as reason:
        if main:
            logger.warning(
                printable(f"--model {config.model.path}: the first process reads the whole model, since {reason}")
            )
    return StartingModel(load_model(config) if main else empty_model(config))


def _lazy_model(config: TrainConfig) -> StartingModel:
    """A model without weights, and the checkpoint to read them from. Raises DlmBridgeError, and NotInRangesError where
    only transformers' own loading can read the checkpoint."""
    place, folder, megatron = config.model.path, None, _megatron_checkpoint(config)
    checkpoint: Checkpoint
    if config.model.from_scratch:
        checkpoint = Bridge.from_scratch(place, config.data.seed, config.model.family).checkpoint
    elif megatron is not None:
        checkpoint = megatron.checkpoint
    else:
        check_weights(place)
        try:
            folder = resolve(place)
            checkpoint = HubCheckpoint(folder)
        except DlmBridgeError as error:
            raise NotInRangesError(str(error)) from error
    if folder is None:
        checkpoint.check()
    model_class, hub_config = _class_and_config(config, megatron)
    if getattr(hub_config, "quantization_config", None) is not None:
        raise NotInRangesError("its weights are quantized")
    with reading(f"--model {place}: its config makes no model"):
        model = model_without_weights(model_class, hub_config, base_dtype(config))
    if folder is not None and loading.other_class(model) is not None:
        raise NotInRangesError(f"its config.json makes a {type(model).__name__}")
    if folder is not None:
        with opening(folder, f"--model {place}: does not load"):
            read_generation_config(model, folder)
    weights = LazyWeights(model, checkpoint)
    if folder is not None and weights.unused:  # of other checkpoints `check` has accounted for it
        _check_unused(config, model, weights.unused)
    for name, tensor in stored_tensors(model):  # as transformers loads those that it does not cast: routers
        for pattern, dtype in model._get_dtype_plan(base_dtype(config)).items():
            if re.search(pattern, name):
                tensor.data = tensor.data.to(dtype or weights.stored_dtype(name))
    return StartingModel(model.eval(), weights)


def _check_unused(config: TrainConfig, model: Any, unused: list[str]) -> None:
    """Log what a class of transformers does not use; raise NotInRangesError where it may be a second copy of a tied
    weight, and for a model of this package, which is refused."""
    if hasattr(model, "family") or not model.state_dict().keys().isdisjoint(unused):
        raise NotInRangesError(f"{unused[0]} is stored besides the model's tensors")
    if os.environ.get("RANK", "0") == "0":
        logger.warning(loading.unused_text(f"--model {config.model.path}", unused))


def _load(config: TrainConfig) -> Any:
    if config.model.from_scratch:
        return _from_scratch(Path(config.model.path), config.data.seed, config.model.family)
    check_quantization(config)
    if (megatron := _megatron_checkpoint(config)) is not None:
        return megatron.build_hf_model(base_dtype(config))
    check_weights(config.model.path)
    return load_hub_model(config.model.path, config.model.family, base_dtype(config), _quantization(config))


def base_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of loaded weights: fp32 where they are trained, otherwise that of the run."""
    if not config.model.adapts:
        return torch.float32
    return {"fp32": torch.float32, "fp16": torch.float16}.get(config.precision.name, torch.bfloat16)


def check_quantization(config: TrainConfig) -> None:
    """Raise DlmBridgeError where the base of an adapter cannot be quantized as asked for."""
    if config.model.lora_quantize is None:
        return
    if (Path(config.model.path) / TRACKER).is_file():
        raise DlmBridgeError(
            f"--lora-quantize: --model {config.model.path} is a Megatron checkpoint: export it to the Hub's layout "
            "first"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise DlmBridgeError("--lora-quantize needs bitsandbytes: pip install 'dlm-bridge[quantize]'")


def check_weights(model: str) -> None:
    """Raise DlmBridgeError where `--model` is neither a Hub folder with whole weights nor a Hub id."""
    check_exists("--model", model)
    if (Path(model) / "adapter_config.json").is_file():
        raise DlmBridgeError(f"--model {model}: is an adapter: give its base as --model and it as --adapter")
    folder, single, index_file = Path(model), SINGLE_FILE, SAFETENSORS_INDEX
    files = sorted(folder.glob("*.safetensors"))
    if not files and any(folder.glob("*.bin")):
        files, single, index_file = sorted(folder.glob("pytorch_model*.bin")), BIN_FILE, BIN_INDEX
    elif not files and folder.is_dir():
        raise DlmBridgeError(f"--model {model}: no weights there (*.safetensors): add --from-scratch to start anew")
    for file in files:
        loading.check_whole(file)
    index = folder / index_file
    if not index.is_file() or (folder / single).is_file():
        return
    shards = read_config(index).get("weight_map")
    names = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
    for name in sorted(names):
        if not (folder / name).is_file():
            raise DlmBridgeError(f"--model {model}: {name}, which {index.name} names, is missing: fetch it again")


def empty_model(config: TrainConfig) -> Any:
    """The PreTrainedModel that `--model` names on the meta device, from config.json alone. Raises DlmBridgeError."""
    model_class, hub_config = _class_and_config(config, _megatron_checkpoint(config))
    with torch.device("meta"), reading(f"--model {config.model.path}: its config makes no model"):
        return model_class(hub_config)


def _megatron_checkpoint(config: TrainConfig) -> Bridge | None:
    """The Megatron checkpoint that `--model` names; None where it names a model of the Hub. Raises DlmBridgeError."""
    if config.model.from_scratch or not (Path(config.model.path) / TRACKER).is_file():
        return None
    return Bridge.from_megatron(config.model.path, family=config.model.family)


def _class_and_config(config: TrainConfig, megatron: Bridge | None) -> tuple[Callable[[Any], Any], Any]:
    """The class, or another factory, of the model that `--model` names, and the configuration object to call it with.
    Raises DlmBridgeError."""
    from transformers import AutoModelForCausalLM

    import dlm_bridge  # noqa: F401  registers the families

    path, family = config.model.path, config.model.family
    if megatron is not None:
        with reading(f"--model {path}: its config makes no model"):
            return _megatron_class_and_config(config, megatron)
    if config.model.from_scratch:
        file = Path(path) / "config.json"
        spec: FamilySpec | None = find_family(read_config(file), family, where=str(file))
    else:
        check_weights(path)
        spec = None if family is None else family_by_name(family)
    hub_config = _hub_config(path, spec)
    spec = spec or _config_family(hub_config)
    if config.model.mask_token_id is not None:
        hub_config.mask_token_id = config.model.mask_token_id
    return (AutoModelForCausalLM.from_config if spec is None else spec.load("model_class")), hub_config


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


def load_hub_model(
    model: str,
    family: str | None = None,
    dtype: torch.dtype = torch.float32,
    quantization: dict[str, Any] | None = None,
) -> Any:
    """The model of a Hub folder or id.

    Args:
        family: name of the family, where the config does not say it.
        dtype: of the weights.
        quantization: further keyword arguments of `from_pretrained`.

    Raises:
        DlmBridgeError: a model that does not exist, is damaged, or is of no supported family.
    """
    check_exists("--model", model)
    from transformers import AutoModelForCausalLM

    import dlm_bridge  # noqa: F401  registers the families

    config = _hub_config(model, None if family is None else family_by_name(family))
    # AutoModelForCausalLM does not know every family's model class.
    spec = _config_family(config)
    model_class: Any = AutoModelForCausalLM if spec is None else spec.load("model_class")
    # The folder of a Hub id is looked up once: where the Hub cannot be reached, each file would be tried for long.
    place = resolve(model) if not Path(model).is_dir() and HUB_ID.fullmatch(model) else model
    return loading.load_pretrained(
        model_class, place, f"--model {model}", config=config, dtype=dtype, **(quantization or {})
    )


def _config_family(hub_config: Any) -> FamilySpec | None:
    """The family of a configuration: that of its class, or a diffusion model that is transformers' own."""
    own: FamilySpec | None = getattr(type(hub_config), "family", None)
    named = set(getattr(hub_config, "architectures", None) or ())
    native = [
        spec for spec in families() if spec.native and spec.kind == "diffusion" and named & set(spec.architectures)
    ]
    return own or (native[0] if native else None)


def model_family(model: Any) -> FamilySpec | None:
    """The family of a live model: its own, or that of its class, for transformers' own classes."""
    own: FamilySpec | None = getattr(model, "family", None)
    named = [
        spec
        for spec in families()
        if (spec.native or spec.kind == "autoregressive") and type(model).__name__ in spec.architectures
    ]
    return own or (named[0] if named else None)


def load_tokenizer(config: TrainConfig) -> Any:
    """The tokenizer of `--tokenizer`, else the model's own, with the template of `--chat-template`. Raises
    DlmBridgeError."""
    if config.model.tokenizer:
        tokenizer = open_tokenizer(config.model.tokenizer, "--tokenizer")
    else:
        tokenizer = open_tokenizer(config.model.path, "--model", ": name one with --tokenizer")
    if config.model.chat_template is not None:
        set_chat_template(tokenizer, config.model.chat_template)
    return tokenizer


def open_tokenizer(place: str, flag: str, remedy: str = "") -> Any:
    """The tokenizer of a Hub folder or id, or of a Megatron checkpoint. Raises DlmBridgeError, whose message has the
    option `flag` that named it and, where there is no tokenizer, the `remedy`."""
    check_exists(flag, place)
    folder = Path(place) / "hf" if (Path(place) / TRACKER).is_file() else Path(place)
    if folder.is_dir():
        return loading.load_tokenizer(folder, f"{flag} {place}", remedy)
    fetch = partial(loading.load_tokenizer, place, f"{flag} {place}", remedy)
    return from_hub(lambda local: fetch(local_files_only=local), f"{flag} {place}", "its tokenizer")


def _quantization(config: TrainConfig) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained` that quantize the weights on this process's device; none without
    `--lora-quantize`."""
    if config.model.lora_quantize is None:
        return {}
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_8bit=True)
    if config.model.lora_quantize == "4bit":
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=base_dtype(config),
        )
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else "cpu"
    return {"quantization_config": settings, "device_map": {"": device}}


def _from_scratch(folder: Path, seed: int, family: str | None) -> Any:
    """A model of the folder's config.json with its family's initial weights, in fp32. Raises DlmBridgeError."""
    import dlm_bridge  # noqa: F401  registers the families

    file = folder / "config.json"
    raw = read_config(file)
    spec = find_family(raw, family, where=str(file))
    config = _hub_config(str(folder), spec)
    weights = dict(spec.initial_weights(raw, seed))
    model_class = spec.load("model_class")
    # Through transformers' own loading, so that names are converted as for a checkpoint and coverage is checked.
    with reading(f"--model {folder}: its config makes no model"):
        model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    model.config.name_or_path = str(folder)
    return model


def _hub_config(model: str, family: FamilySpec | None) -> Any:
    """The configuration object of a Hub folder or id, of `family` or of the one that the config names. Raises
    DlmBridgeError."""
    from transformers import AutoConfig

    config_class = AutoConfig if family is None else family.load("config_class")
    place = model if Path(model).is_dir() else str(_config_from_hub(model).parent)
    class_names(read_config(Path(place) / CONFIG_FILE), f"--model {model}: {CONFIG_FILE}")
    with opening(model, f"--model {model}: its config does not load"):
        try:
            config = config_class.from_pretrained(place, trust_remote_code=False)
        except ValueError as error:
            if family is not None or not _UNKNOWN_TYPE.search(str(error)):
                raise
            raise DlmBridgeError(
                f"--model {model}: its config does not say which family it is: name it with --family "
                f"({one_line(error).split('. ')[0]})"
            ) from None
        if family is None and (hidden := _family_behind(config)) is not None:
            return hidden.load("config_class").from_pretrained(place)
    if family is not None and not isinstance(config, config_class):
        raise DlmBridgeError(
            f"--family {family.name}: the config of {model} names another family, {config.architectures[0]}: "
            "leave --family out"
        )
    return config


def _config_from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    def fetch(local: bool) -> Path:
        return Path(hf_hub_download(model, CONFIG_FILE, local_files_only=local))

    return from_hub(fetch, f"--model {model}", f"its {CONFIG_FILE}")


def _family_behind(hub_config: Any) -> FamilySpec | None:
    """The diffusion family of a config that transformers reads as another model's, since they share a model type."""
    if getattr(type(hub_config), "family", None) is not None or not getattr(hub_config, "architectures", None):
        return None
    named = {"architectures": hub_config.architectures, "auto_map": getattr(hub_config, "auto_map", None)}
    try:
        spec = find_family(named)
    except DlmBridgeError:  # of no family here
        return None
    shared = spec.sampled_here and not spec.auto_classes and spec.model_type == hub_config.model_type
    return spec if shared else None


def check_exists(flag: str, place: str) -> None:
    """Raise DlmBridgeError where `place` is neither a folder nor a Hub id, which has at most one slash and does not
    begin like a path."""
    looks_like_path = place.startswith((".", "/", "~")) or place.count("/") > 1
    if looks_like_path and not Path(place).is_dir():
        raise DlmBridgeError(f"{flag} {place}: no such folder")


@dataclass(frozen=True)
class MegatronSource:
    """What a Megatron run starts with: `bridge` to the checkpoint of its weights, and `model`, the Hub model on the
    meta device, which gives family, config and sizes."""

    bridge: Bridge
    model: Any


def open_megatron_source(config: TrainConfig, checkpoint: Path | None) -> MegatronSource:
    """The source that `--model` names, or on a resume the run's own `checkpoint`, but for an adapter's base. Raises
    DlmBridgeError."""
    if checkpoint is not None and not config.model.adapts:
        bridge = Bridge.from_megatron(checkpoint)
    elif config.model.from_scratch:
        bridge = Bridge.from_scratch(config.model.path, config.data.seed, family=config.model.family)
    elif (Path(config.model.path).parent / TRACKER).is_file():
        raise DlmBridgeError(
            f"--model {config.model.path}: it is an iteration of a Megatron checkpoint: give the folder that holds it "
            f"and {TRACKER}, or export this one"
        )
    elif (Path(config.model.path) / TRACKER).is_file():
        bridge = Bridge.from_megatron(config.model.path, family=config.model.family)
    else:
        bridge = Bridge.from_hf(config.model.path, family=config.model.family)
    with torch.device("meta"), reading(f"--model {config.model.path}: its config makes no model"):
        model_class, hub_config = _megatron_class_and_config(config, bridge)
        model = model_class(hub_config)
    if (folder := bridge.checkpoint.hub.folder) is not None:
        with opening(folder, f"--model {config.model.path}: does not load"):
            read_generation_config(model, folder)
    return MegatronSource(bridge, model)


def _megatron_class_and_config(config: TrainConfig, bridge: Bridge) -> tuple[Callable[[Any], Any], Any]:
    """As `_class_and_config`, of the model behind `bridge`."""
    hub_config = bridge.family.load("config_class").from_dict(bridge.config)
    hub_config.name_or_path = bridge.code_place
    if config.model.mask_token_id is not None:
        hub_config.mask_token_id = config.model.mask_token_id  # saved with every checkpoint
    return bridge.family.load("model_class"), hub_config


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
