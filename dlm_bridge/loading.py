"""Model loading: a Hub folder or id, a Megatron checkpoint or a PEFT folder, with its tokenizer."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from dlm_bridge.convert.checkpoints import is_megatron, open_checkpoint
from dlm_bridge.convert.formats.hub_weights import check_safetensors
from dlm_bridge.convert.lora import export_adapter, named_base, open_adapter
from dlm_bridge.convert.lora.mask_only import key_is_known, mask_only_token, restrict_to_masks
from dlm_bridge.convert.lora.megatron import ADAPTER_MANIFEST
from dlm_bridge.distributed import (
    Replicas,
    from_all,
    is_main,
    local_rank,
    raised_everywhere,
    start_process_group,
    world_size,
)
from dlm_bridge.errors import DlmBridgeError, first_of, printable
from dlm_bridge.files.atomic import temporary_folder
from dlm_bridge.files.pickles import check_torch_file, restricted_loading
from dlm_bridge.files.reading import check_plain_file, opening
from dlm_bridge.generation.settings import refuse_prompt_learning
from dlm_bridge.hub import ADAPTER_CONFIG, CONFIG_FILE, checkpoint_folder, read_config, resolve
from dlm_bridge.mapping.dtypes import SAFETENSORS_DTYPES, parse_dtype
from dlm_bridge.models.families import FamilySpec, class_names, families, find_family
from dlm_bridge.models.special_tokens import align_special_tokens

logger = logging.getLogger(__name__)
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Placement:
    """Where a model's weights go: one device, transformers' `device_map` over several, or its tensor parallelism; as
    `replicated` by a launcher's processes, each one's own device."""

    device: str | None = None  # by default the accelerator, or the CPU
    device_map: str | None = None  # one of DEVICE_MAPS, or a JSON object from modules to devices
    offload_folder: str | None = None  # for weights that a device map offloads to disk
    tp_plan: str | None = None  # "auto": the family's own plan, over the launcher's processes
    replicated: bool = False  # the launcher's processes may hold several copies of the model
    tp: int | None = None  # how many neighbouring processes hold one copy, by that plan; all of them by default

    @property
    def tensor_parallel(self) -> bool:
        """Whether processes hold shards of the model."""
        return self.tp_plan is not None if self.tp is None else self.tp > 1

    @property
    def tp_size(self) -> int:
        """How many of the launcher's processes hold one copy of the model."""
        return (self.tp or world_size()) if self.tensor_parallel else 1

    def arguments(self) -> dict[str, Any]:
        """The arguments of `from_pretrained`. Raises DlmBridgeError for devices that do not exist."""
        processes = world_size()
        if sum([self.device is not None, self.device_map is not None, self.tensor_parallel]) > 1:
            cut = "--tp-plan" if self.tp is None else "--tp"
            raise DlmBridgeError(f"--device, --device-map and {cut} each say where the model goes: give one of them")
        if self.offload_folder is not None and self.device_map is None:
            raise DlmBridgeError("--offload-folder is a device map's: give --device-map as well")
        if self.tp_plan not in (None, "auto"):
            raise DlmBridgeError(f"--tp-plan {self.tp_plan}: auto is the only one")
        if self.tensor_parallel:
            return self._tensor_parallel(processes)
        if processes > 1 and not self.replicated:
            raise DlmBridgeError(
                f"{processes} processes would each hold the whole model: add --tp-plan auto, or start one process"
            )
        if processes > 1:
            device = self._own_device()
            if device.type == "cpu":
                return {}
            torch.accelerator.set_device_index(device.index)  # nothing of this process is to be on the first one
            return {"device_map": {"": str(device)}}
        if self.device_map is not None:
            more = {} if self.offload_folder is None else {"offload_folder": self.offload_folder}
            return {"device_map": _device_map(self.device_map), **more}
        device = self._device()
        return {} if device.type == "cpu" else {"device_map": {"": str(device)}}

    def _device(self) -> torch.device:
        best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if self.device is None:
            return best or torch.device("cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise DlmBridgeError(f"--device {self.device}: no such device: such as cpu, cuda or cuda:1") from None
        if device.type != "cpu":
            count = torch.accelerator.device_count() if best is not None and best.type == device.type else 0
            if (device.index or 0) >= count:
                raise DlmBridgeError(f"--device {self.device}: this machine has {count} of them")
        return device

    def _own_device(self) -> torch.device:
        """The device of this one of the launcher's processes."""
        if self.device_map is not None:
            raise DlmBridgeError(
                "--device-map spreads a model over all GPUs, and each process would do so: start one process, or "
                "leave it out for one GPU a process"
            )
        device = self._device()
        if device.type == "cpu":
            return device
        if device.index is not None:
            raise DlmBridgeError(f"--device {self.device}: each process has a GPU of its own: give {device.type}")
        local, count = local_rank() or 0, torch.accelerator.device_count()
        if local >= count:
            raise DlmBridgeError(
                f"a process for each GPU, of which this machine has {count}: start no more, or give --device cpu"
            )
        return torch.device(device.type, local)

    def _tensor_parallel(self, processes: int) -> dict[str, Any]:
        if processes == 1:
            cut, count = ("--tp-plan", "N") if self.tp is None else (f"--tp {self.tp}", str(self.tp))
            raise DlmBridgeError(
                f"{cut} cuts the model over several processes: start them with "
                f"torchrun --nproc-per-node {count} -m dlm_bridge.cli ..."
            )
        copies, rest = divmod(processes, self.tp_size)
        if rest:
            raise DlmBridgeError(
                f"--tp {self.tp} does not divide {processes} processes: give a divisor, or start a multiple of it"
            )
        if copies > 1 and not self.replicated:
            raise DlmBridgeError(
                f"{processes} processes with --tp {self.tp} hold {copies} models for one prompt: start {self.tp}, or "
                "give a file of prompts with --jsonl"
            )
        from dlm_bridge.generation.runtime.tensor_parallel import distributed_config

        return {"distributed_config": distributed_config(self.tp_size, copies)}


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode and its tokenizer.

    Args:
        family: the family's name, or the class of an autoregressive model of no family.
        diffusion: this package samples and scores it as a diffusion model; any other, DiffusionGemma too, is sampled
            by transformers' own `generate`.
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
) -> LoadedModel:
    """The model of a Hub folder or id, diffusion or autoregressive, of a Megatron checkpoint of any format, of an
    adapter, a PEFT folder or Megatron's, on the base that it or its run names, or of the newest checkpoint in a
    training run's folder.

    `dtype` is keep, bf16, fp16 or fp32 (None keeps the stored one); `like` names the Hub model of a Megatron
    checkpoint, or the base of an adapter, that was not written by dlm-bridge; `tokenizer` a folder or id of another
    tokenizer.

    Raises:
        DlmBridgeError: a place that holds no model that can be sampled from, no tokenizer, or a placement that the
            machine does not have.
    """
    where = (placement or Placement()).arguments()
    wanted = parse_dtype(dtype)
    path = checkpoint_folder(place)
    if path.is_dir() and is_megatron(path):
        if revision is not None:
            raise DlmBridgeError(f"--revision {revision} needs a Hub id, but {path} is a local folder")
        base = (like or named_base(path)) if (path / ADAPTER_MANIFEST).is_file() else None
        with _exported(path, like, family, base) as folder:
            if base is not None:
                return _load_adapter(folder, str(path), base, placement, dtype, family, tokenizer)
            return _load_folder(folder, where, wanted, family, str(path), tokenizer)
    if like is not None:
        raise DlmBridgeError(f"--like {like} names the Hub model of a Megatron checkpoint, which {path} is not")
    folder = resolve(path, revision)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG_FILE).is_file():
        return _load_adapter(folder, str(folder), named_base(folder), placement, dtype, family, tokenizer)
    return _load_folder(folder, where, wanted, family, os.fspath(path), tokenizer)


def join_replicas(placement: Placement) -> Replicas:
    """The launcher's processes, each with its model, or its shard of one, loaded."""
    return Replicas.of_launcher(placement.tp_size)


def load_tokenizer(
    place: str | os.PathLike[str], name: str, remedy: str = "", *, local_files_only: bool = False
) -> Any:
    """The tokenizer of a Hub folder or id, called `name` in errors; `local_files_only` looks for it in the Hub's cache
    alone. Raises DlmBridgeError."""
    from transformers import AutoTokenizer

    import dlm_bridge  # noqa: F401  registers the families' own

    with opening(place, f"{name}: no tokenizer that loads there", remedy):
        # False, not unset: transformers would ask on the terminal whether to run the folder's code.
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False, local_files_only=local_files_only)


def _load_folder(
    folder: Path,
    where: dict[str, Any],
    dtype: torch.dtype | None,
    family: str | None,
    name: str,
    tokenizer: str | None,
) -> LoadedModel:
    remedy = "" if tokenizer else ": name one with --tokenizer"
    loaded = load_tokenizer(tokenizer or folder, f"--tokenizer {tokenizer}" if tokenizer else name, remedy)
    raw = read_config(folder / CONFIG_FILE)
    spec = _family(raw, family, folder)
    if not any([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        raise DlmBridgeError(f"{name}: no weights there (*.safetensors)")
    model = _load_weights(folder, where, dtype, spec, name)
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
    """What is said of a model that is sampled from in the precision that it is stored in; None where that is fast."""
    if device != "cuda" or dtype != torch.float32:
        return None
    return printable(
        f"{name}: the weights are fp32, as training saves them, and so is the computation: --dtype bf16 is several "
        "times faster on a GPU"
    )


def _load_adapter(
    folder: Path,
    name: str,
    base: str,
    placement: Placement | None,
    dtype: str | torch.dtype | None,
    family: str | None,
    tokenizer: str | None,
) -> LoadedModel:
    """A PEFT folder's adapter, called `name` in errors, on its base model."""
    from peft import PeftConfig, PeftModel

    if placement is not None and placement.tensor_parallel:
        cut = "--tp-plan" if placement.tp is None else "--tp"
        raise DlmBridgeError(f"{cut} cuts whole models: merge {name} first (dlm-bridge adapter export --merge)")
    with opening(folder, f"{name}: is no adapter of {base}"), key_is_known():
        adapter = PeftConfig.from_pretrained(str(folder))
    refuse_prompt_learning(adapter, name)
    own = folder if tokenizer is None and (folder / "tokenizer_config.json").is_file() else tokenizer
    opened = load_model(base, placement, dtype=dtype, family=family, tokenizer=None if own is None else str(own))
    token = mask_only_token(folder)
    with opening(folder, f"{name}: is no adapter of {base}"), key_is_known(), restricted_loading():
        model = PeftModel.from_pretrained(opened.model, str(folder))
        if token is not None:
            restrict_to_masks(model, token)
    return replace(opened, model=model.eval())


def _family(raw: dict[str, Any], family: str | None, folder: Path) -> FamilySpec | None:
    """The family of a config.json; None for an autoregressive class of transformers without one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        return find_family(raw, family, where=str(folder / CONFIG_FILE))
    except DlmBridgeError:
        stock = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        # A stock class name beside remote code may stand for what is not autoregressive at all.
        named = next(iter(class_names(raw, str(folder / CONFIG_FILE))), None)
        if family is None and not raw.get("auto_map") and named in stock:
            return None
        raise


def _load_weights(
    folder: Path, where: dict[str, Any], dtype: torch.dtype | None, spec: FamilySpec | None, name: str
) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    import dlm_bridge  # noqa: F401  registers the families

    arguments: dict[str, Any] = {**where, "dtype": dtype or _stored_dtype(folder)}
    model_class: Any = AutoModelForCausalLM
    with opening(folder, f"{name}: does not load"):
        if spec is not None:
            model_class = spec.load("model_class")
            arguments["config"] = spec.load("config_class").from_pretrained(folder)
        if (distributed := where.get("distributed_config")) is not None:
            check_tensor_parallel_split(
                arguments.get("config") or AutoConfig.from_pretrained(folder), distributed.tp_size, name
            )
    model = load_pretrained(model_class, folder, name, **arguments)
    if distributed is not None:
        from dlm_bridge.generation.runtime.tensor_parallel import use_plain_shards

        use_plain_shards(model)
    return model


def load_pretrained(model_class: Any, place: str | os.PathLike[str], name: str, **arguments: Any) -> Any:
    """`model_class.from_pretrained(place, ...)`, with every parameter from the checkpoint: transformers' own classes
    leave others at random values and print a long report. Raises DlmBridgeError, which calls the model `name`."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with opening(place, f"{name}: does not load"), restricted_loading():
            model, info = model_class.from_pretrained(
                place, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
            )
    finally:
        logging.set_verbosity(verbosity)
    if (spec := other_class(model)) is not None:
        raise DlmBridgeError(
            f"{name}: config.json names {spec.architectures[0]} and model_type {model.config.model_type!r}, "
            f"by which transformers makes a {type(model).__name__}: set model_type to {spec.model_type!r}"
        )
    if missing := sorted(info["missing_keys"]):
        raise DlmBridgeError(f"{name}: the checkpoint lacks {first_of(missing)}")
    if mismatched := sorted(info["mismatched_keys"]):
        tensor, found, wanted = mismatched[0]
        raise DlmBridgeError(
            f"{name}: {tensor} has shape {tuple(found)} in the checkpoint, {tuple(wanted)} by the config"
        )
    if (unexpected := sorted(info["unexpected_keys"])) and is_main():
        logger.warning(unused_text(name, unexpected))
    return model


def unused_text(name: str, tensors: list[str]) -> str:
    """What is said of a checkpoint's tensors that the model `name` has no place for."""
    return printable(f"{name}: the checkpoint has {first_of(tensors)}, which the model does not use")


def other_class(model: Any) -> FamilySpec | None:
    """The diffusion family that a model's config names, where its class is none of this package."""
    named = set(getattr(model.config, "architectures", None) or ())
    diffusion = [spec for spec in families() if spec.sampled_here and named & set(spec.architectures)]
    return diffusion[0] if diffusion and getattr(model, "family", None) is None else None


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
        check_whole(file)
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                part = tensors.get_slice(name)
                sizes[part.get_dtype()] += prod(part.get_shape())
    return SAFETENSORS_DTYPES.get(sizes.most_common(1)[0][0], "auto") if sizes else "auto"


def _device_map(choice: str) -> Any:
    if choice in DEVICE_MAPS:
        return choice
    try:
        parsed = json.loads(choice)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise DlmBridgeError(
            f'--device-map {choice}: one of {", ".join(DEVICE_MAPS)}, or a JSON object such as \'{{"": "cpu"}}\''
        )
    return parsed


@contextmanager
def _exported(root: Path, like: str | None, family: str | None, base: str | None) -> Iterator[Path]:
    """A Megatron checkpoint as a temporary Hub folder, an adapter's of `base` as a PEFT folder, exported by one
    process."""
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


# By the last part of a plan's rule: what it cuts, in words, and the configuration's field that counts it.
_SPLIT_DIMENSIONS = {
    "q_proj": ("attention heads", "num_attention_heads"),
    "k_proj": ("key/value heads", "num_key_value_heads"),
    "gate_up_proj": ("columns of an expert", "moe_intermediate_size"),
}


def check_tensor_parallel_split(
    config: Any, processes: int, name: str, flag: str = "--tp", otherwise: str = "use --device-map auto"
) -> None:
    """Raise DlmBridgeError, which calls the model `name`, where transformers' tensor parallel plan for the config's
    class would split a head or an expert between processes, or where that class has no plan: it says to give `flag`
    another number, or what to do `otherwise`."""
    config = config.get_text_config()
    plan = config.base_model_tp_plan
    if not plan:
        raise DlmBridgeError(
            f"{name}: transformers has no tensor parallelism for {type(config).__name__}: {otherwise}"
        )
    cut = [rule.rsplit(".", 1)[-1] for rule, style in plan.items() if style in ("colwise", "packed_colwise")]
    counts = {
        _SPLIT_DIMENSIONS[part][0]: getattr(config, _SPLIT_DIMENSIONS[part][1], None)
        for part in cut
        if part in _SPLIT_DIMENSIONS
    }
    known = {what: count for what, count in counts.items() if count}
    for what, count in known.items():
        if count % processes:
            whole = gcd(*known.values())
            fits = ", ".join(str(number) for number in range(2, whole + 1) if whole % number == 0)
            raise DlmBridgeError(
                f"{name}: {count} {what} cannot be shared by {processes} processes: "
                + (f"give {flag} {fits}, or {otherwise}" if fits else otherwise)
            )
