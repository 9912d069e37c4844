"""LoRA adapters by PEFT: target layers, initialisation, saving and resuming."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from dlm_bridge.convert.card import CARD, base_family, folder_card
from dlm_bridge.convert.lora.mask_only import key_is_known, mask_only_token, record_mask_only, restrict_to_masks
from dlm_bridge.convert.lora.megatron import ADAPTER_MANIFEST
from dlm_bridge.convert.lora.peft import ADAPTER_WEIGHTS, check_plain
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.files.pickles import restricted_loading
from dlm_bridge.files.reading import opening
from dlm_bridge.generation.gemma import is_gemma
from dlm_bridge.hub import ADAPTER_CONFIG, check_named_base, read_config
from dlm_bridge.loading.lazy import MAGNITUDE, LazyWeights, replace_parameters
from dlm_bridge.loading.pretrained import decoder_layers, model_family
from dlm_bridge.objectives.noise import torch_seed
from dlm_bridge.objectives.registry import mask_token_id
from dlm_bridge.settings import comma_separated
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.files import Config

BASE = "base.json"  # beside an adapter: the base that it was trained on
EXPERTS = "experts"  # a target: the routed experts, whose weights are one stack a layer
STEP = 0  # of the seed of a new adapter's weights: before the first step
SAMPLED = 64  # rows of the embedding, and elements of each, in a base's fingerprint


def with_lora(config: Config, model: Any) -> Config:
    """The configuration with its adapter's settings resolved. Raises DlmBridgeError for targets that are no linear
    layers of the model nor its experts, and for an adapter that is not plain LoRA or names another base."""
    if config.model.adapter is not None:
        check_adapter(Path(config.model.adapter), config.model.path)
    if not config.model.lora_rank:
        return config
    family = model_family(model)
    assert family is not None, "with_objective has refused a model of no family"
    targets = comma_separated(config.model.lora_targets)
    for target in targets:
        _check_target(model, target)
    targets = targets or [name for name in family.lora_targets if name in linear_layers(model)]
    if EXPERTS in targets and config.model.lora_dropout:
        raise DlmBridgeError(f"--lora-dropout: PEFT has none for {EXPERTS}: leave one of them out")
    if EXPERTS in targets and config.model.lora_dora:
        raise DlmBridgeError(f"--lora-dora: there is no DoRA of stacked {EXPERTS}: leave one of them out")
    if config.model.lora_mask_only and config.objective.name != "idlm":
        raise DlmBridgeError(f"--lora-mask-only: is I-DLM's, of objective idlm, not of {config.objective.name}")
    alpha = 2.0 * config.model.lora_rank if config.model.lora_alpha is None else config.model.lora_alpha
    return config.replace(lora_targets=",".join(targets), lora_alpha=alpha)


@dataclass(frozen=True)
class Adapter:
    """The adapter of a model. `peft` is PEFT's wrapper of it, which has replaced its linear layers."""

    peft: Any
    base: str  # as --model names it
    fingerprint: str | None  # of the base's weights; None where this process has none
    mask_only: int | None = None  # the mask token, of an adapter that acts there alone

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by PEFT's names."""
        return {name: weight for name, weight in self.peft.named_parameters() if weight.requires_grad}

    def _with_copies(self) -> dict[str, torch.Tensor]:
        """The trained parameters under each of their names: PEFT's own loading shares none."""
        named = self.peft.named_parameters(remove_duplicate=False)
        return {name: weight for name, weight in named if weight.requires_grad}

    def described(self) -> str:
        """One line about the trained parameters."""
        settings, weights = self.peft.peft_config["default"], self.parameters()
        modules = [name.split(".lora_")[0].removesuffix(".base_layer") for name in weights]
        kinds = sorted({module.rpartition(".")[2] for module in modules})
        numbers = sum(weight.numel() for weight in weights.values())
        where = "" if self.mask_only is None else ", at mask tokens alone"
        return (
            f"{'DoRA' if settings.use_dora else 'LoRA'} of rank {settings.r}, alpha {settings.lora_alpha:g}, in "
            f"{sum('.lora_A.' in name for name in weights)} linear layers "
            f"({', '.join(kinds)}){where}: {numbers:,} parameters are trained"
        )

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write PEFT's adapter_config.json and adapter_model.safetensors, and the base's fingerprint; `state_dict`
        replaces `parameters()` where these are sharded."""
        tensors = self._with_copies() if state_dict is None else state_dict
        self.peft.save_pretrained(folder, state_dict=dict(tensors), save_embedding_layers=False)
        adapter = read_config(folder / ADAPTER_CONFIG)
        (folder / CARD).write_text(folder_card(base_family(adapter), None, adapter), "utf-8")  # PEFT's is a form
        if self.mask_only is not None:
            record_mask_only(folder, self.mask_only)
        (folder / BASE).write_text(json.dumps({"base": self.base, "fingerprint": self.fingerprint}, indent=2) + "\n")


def add_adapter(
    config: TrainConfig, model: Any, folder: Path | None = None, weights: LazyWeights | None = None
) -> Adapter:
    """Put the adapter of a configuration that `with_lora` gave into `model`, whose own weights are then frozen: the
    one in `folder` (a checkpoint of the run), else that of `--adapter`, else a new one, which changes nothing yet.

    In a model on the meta device it has values where `weights` are the model's. Raises DlmBridgeError for an adapter
    of another base.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    folder = folder or (None if config.model.adapter is None else Path(config.model.adapter))
    on_meta = weights is None and model.get_input_embeddings().weight.is_meta
    found: str | None
    if weights is not None:
        found = fingerprint(model, lambda name: weights.whole(name, model.get_parameter(name).shape))
    else:
        found = None if on_meta else fingerprint(model)
    settings = _new(config, model)
    mask_only = mask_token_id(model) if config.model.lora_mask_only else None
    torch.manual_seed(torch_seed(config.data.seed, STEP, 0))
    where = folder if folder is not None else "lora_rank"
    with opening(folder or config.model.path, where, f"is not an adapter of {config.model.path}"):
        if folder is not None:
            with key_is_known():
                settings = LoraConfig.from_pretrained(str(folder))
            mask_only = mask_only_token(folder)
            settings.inference_mode = False
            settings.base_model_name_or_path = _base_name(config.model.path)
            check_base(folder, found, config.model.path)
        with contextlib.nullcontext() if weights is None else _stand_ins(model):
            peft = get_peft_model(model, settings)
        peft.peft_config["default"].base_model_name_or_path = _base_name(config.model.path)
        if folder is None and weights is not None:
            for name, weight in model.named_parameters():
                if MAGNITUDE in name:
                    weight.is_new = True  # the norms of stand-ins
        if folder is not None and not on_meta:
            with restricted_loading():
                loaded = load_peft_weights(str(folder), device="cpu")
            result: Any = set_peft_model_state_dict(peft, loaded)
            left = [*result.unexpected_keys, *(name for name in result.missing_keys if ".lora_" in name)]
            if left:
                raise ValueError(f"{left[0]} is not in both")
    if is_gemma(model):
        _share_between_towers(model)
    if mask_only is not None:
        restrict_to_masks(peft, mask_only)
    return Adapter(peft, _base_name(config.model.path), found, mask_only)


@contextlib.contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Weights on the CPU that take no memory, in the place of those on the meta device: PEFT puts an adapter on its
    layer's device."""
    placed: dict[int, nn.Parameter] = {}  # by the stand-in
    swapped: dict[int, nn.Parameter] = {}  # by the weight
    for weight in model.parameters():
        stand_in = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape))
        placed[id(stand_in)], swapped[id(weight)] = weight, stand_in
    replace_parameters(model, swapped)
    try:
        yield
    finally:
        for weight, stand_in in zip(placed.values(), swapped.values(), strict=True):
            weight.requires_grad_(stand_in.requires_grad)
        replace_parameters(model, placed)


def _share_between_towers(model: Any) -> None:
    """DiffusionGemma's encoder and decoder are one text tower: one adapter changes both."""
    for encoder, decoder in zip(model.model.encoder.language_model.layers, model.model.decoder.layers, strict=True):
        twins = dict(encoder.named_modules())
        for name, module in decoder.named_modules():
            for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
                for adapter, factor in getattr(module, part, {}).items():
                    getattr(twins[name], part)[adapter].weight = factor.weight


def check_adapter(folder: Path, base: str) -> None:
    """Raise DlmBridgeError for a folder without a plain LoRA adapter, and for one that names another Hub id as its
    base than `base`."""
    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / ADAPTER_WEIGHTS).is_file():
        raise DlmBridgeError(f"--adapter {folder}: no PEFT adapter there ({ADAPTER_CONFIG} and {ADAPTER_WEIGHTS})")
    settings = read_config(folder / ADAPTER_CONFIG)
    check_plain(settings, folder / ADAPTER_CONFIG)
    named = settings.get("base_model_name_or_path")
    check_named_base(named, base, folder, compared=(folder / BASE).is_file())  # by `check_base`


def fingerprint(model: Any, read: Callable[[str], torch.Tensor] | None = None) -> str:
    """A digest of a base's weights that does not depend on its precision: of a part of the embedding and of the
    norms, in bf16. `read` gives a parameter's values by its name, where the model has none."""
    digest = xxhash.xxh3_128()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and weight is not model.get_input_embeddings().weight:
            continue
        rows = weight.detach() if read is None else read(name)
        if weight.dim() > 1:
            rows = rows[:: max(1, len(rows) // SAMPLED), :SAMPLED]
        digest.update(name.encode())
        digest.update(rows.to(torch.bfloat16).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _new(config: TrainConfig, model: Any) -> Any:
    from peft import LoraConfig

    names = comma_separated(config.model.lora_targets)
    targets: Any = [name for name in names if name != EXPERTS]
    if targets and is_gemma(
        model
    ):  # not the vision tower, nor the self-conditioning block, whose layers have the same names
        linear = "|".join(targets)
        targets = rf"model\.(decoder|encoder\.language_model)\.layers\.\d+\.(self_attn|mlp)\.({linear})"
    alpha = config.model.lora_alpha or 1.0
    return LoraConfig(
        task_type=None if is_gemma(model) else "CAUSAL_LM",
        r=max(1, config.model.lora_rank),
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=config.model.lora_dropout,
        target_modules=targets,
        target_parameters=expert_stacks(model) if EXPERTS in names else None,
        use_dora=config.model.lora_dora,
    )


def expert_stacks(model: Any) -> list[str]:
    """The last two parts of the names of the experts' stacked weights."""
    return sorted(
        {
            ".".join(name.split(".")[-2:])
            for layer in decoder_layers(model)
            for name, weight in layer.named_parameters()
            if weight.dim() == 3 and "experts." in name
        }
    )


def linear_layers(model: Any) -> set[str]:
    """The last parts of the names of the linear layers in the decoder layers."""
    return {
        name.rpartition(".")[2]
        for layer in decoder_layers(model)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }


def _check_target(model: Any, target: str) -> None:
    """Raise DlmBridgeError unless `target` is one of `linear_layers`, or EXPERTS where the decoder layers have stacks
    of them."""
    linear = linear_layers(model)
    stacks = expert_stacks(model)
    if target in linear or (target == EXPERTS and stacks):
        return
    why = "the model has no such linear layer in its decoder layers"
    if target == EXPERTS:
        why = "the model has no routed experts"
    if any(target in name.replace("gate_up_proj", "gate_proj.up_proj") for name in stacks):
        why = f"the experts' weights are one stack: they are the target {EXPERTS}"
    known = sorted(linear) + [EXPERTS] * bool(stacks)
    raise DlmBridgeError(f"--lora-targets {target}: {why}: choose of {', '.join(known)}")


def check_base(folder: Path, found: str | None, model: str) -> None:
    """Raise DlmBridgeError where an adapter's folder, in PEFT's layout or Megatron's, records another fingerprint of
    its base than `found`, that of `model`. None is not compared."""
    path = next((folder / name for name in (BASE, ADAPTER_MANIFEST) if (folder / name).is_file()), None)
    if found is None or path is None:
        return
    recorded = read_config(path)
    if recorded.get("fingerprint") not in (None, found):
        base = recorded.get("base")
        name = base.get("name") if isinstance(base, dict) else base
        raise DlmBridgeError(f"{folder}: is an adapter of {name}, which has other weights than --model {model}")


def _base_name(model: str) -> str:
    """The base as an adapter names it: a Hub id, or a folder from wherever it is opened."""
    return str(Path(model).absolute()) if Path(model).exists() else model
