"""LoRA adapters with PEFT: target layers, initialisation, saving and resuming."""

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

from dlm_bridge.convert.lora.mask_only import key_is_known, mask_only_token, record_mask_only, restrict_to_masks
from dlm_bridge.convert.lora.megatron import ADAPTER_MANIFEST
from dlm_bridge.convert.lora.peft import ADAPTER_WEIGHTS, check_plain
from dlm_bridge.errors import CheckpointError, SettingError, counted
from dlm_bridge.files.pickles import restricted_loading
from dlm_bridge.files.reading import opening
from dlm_bridge.generation.gemma import is_gemma
from dlm_bridge.hub import ADAPTER_CONFIG, check_named_base, read_config
from dlm_bridge.loading.lazy import MAGNITUDE, LazyWeights, replace_parameters
from dlm_bridge.loading.pretrained import decoder_layers, model_family
from dlm_bridge.objectives.noise import torch_seed
from dlm_bridge.objectives.registry import mask_token_id
from dlm_bridge.settings import comma_separated
from dlm_bridge.train.config import TrainConfig, refuse
from dlm_bridge.train.config.files import Config

BASE = "base.json"  # file of an adapter folder: the base model that it was trained on
EXPERTS = "experts"  # target: the routed experts, whose weights are stacked per layer
STEP = 0  # step in the seed of a new adapter's weights
SAMPLED = 64  # number of embedding rows, and of elements per row, in the fingerprint of a base


def with_lora(config: Config, model: Any) -> Config:
    """Resolve the settings of the adapter.

    Raises:
        SettingError: a target is neither a linear layer nor the experts of the model, or the targets exclude an
            option. CheckpointError: the adapter to continue is not plain LoRA or names another base.
    """
    if config.model.adapter is not None:
        check_adapter(Path(config.model.adapter), config.model.model)
    if not config.model.lora_rank:
        return config
    family = model_family(model)
    assert family is not None, "with_objective refuses a model without a family"
    targets = comma_separated(config.model.lora_targets)
    for target in targets:
        _check_target(model, target)
    targets = targets or [name for name in family.lora_targets if name in linear_layers(model)]
    experts = EXPERTS in targets
    refuse(
        (experts and config.model.lora_dropout, "lora_dropout",
         f"excludes `lora_targets={EXPERTS}`: PEFT does not support it for stacked weights"),
        (experts and config.model.lora_dora, "lora_dora",
         f"excludes `lora_targets={EXPERTS}`: stacked weights have no magnitudes"),
        (config.model.lora_mask_only and config.objective.objective != "idlm", "lora_mask_only",
         f"needs `objective=idlm`, not {config.objective.objective}"),
    )  # fmt: skip
    alpha = 2.0 * config.model.lora_rank if config.model.lora_alpha is None else config.model.lora_alpha
    return config.replace(lora_targets=",".join(targets), lora_alpha=alpha)


@dataclass(frozen=True)
class Adapter:
    """Adapter of a model.

    Args:
        peft: PEFT's wrapper of the model, whose linear layers it has replaced.
        base: name of the base model, as in `model`.
        fingerprint: digest of the base's weights; None if this process has none.
        mask_only: the mask token, for an adapter that is applied only there.
    """

    peft: Any
    base: str
    fingerprint: str | None
    mask_only: int | None = None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by PEFT's names."""
        return {name: weight for name, weight in self.peft.named_parameters() if weight.requires_grad}

    def _with_copies(self) -> dict[str, torch.Tensor]:
        """Trained parameters under all of their names, because PEFT does not share them when it loads."""
        named = self.peft.named_parameters(remove_duplicate=False)
        return {name: weight for name, weight in named if weight.requires_grad}

    def described(self) -> str:
        """One-line description of the trained parameters."""
        settings, weights = self.peft.peft_config["default"], self.parameters()
        modules = [name.split(".lora_")[0].removesuffix(".base_layer") for name in weights]
        kinds = sorted({module.rpartition(".")[2] for module in modules})
        numbers = sum(weight.numel() for weight in weights.values())
        where = "" if self.mask_only is None else ", only at mask tokens"
        return (
            f"{'DoRA' if settings.use_dora else 'LoRA'} of rank {settings.r}, alpha {settings.lora_alpha:g}, in "
            f"{counted(sum('.lora_A.' in name for name in weights), 'linear layer')} "
            f"({', '.join(kinds)}){where}: {counted(numbers, 'parameter is', 'parameters are')} trained"
        )

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write PEFT's adapter_config.json and adapter_model.safetensors, and the base's fingerprint. `state_dict`
        replaces the parameters if these are sharded."""
        tensors = self._with_copies() if state_dict is None else state_dict
        self.peft.save_pretrained(folder, state_dict=dict(tensors), save_embedding_layers=False)
        if self.mask_only is not None:
            record_mask_only(folder, self.mask_only)
        (folder / BASE).write_text(json.dumps({"base": self.base, "fingerprint": self.fingerprint}, indent=2) + "\n")


def add_adapter(
    config: TrainConfig, model: Any, folder: Path | None = None, weights: LazyWeights | None = None
) -> Adapter:
    """Add the adapter to `model`, and freeze the model's own weights.

    Args:
        config: a configuration from `with_lora`.
        folder: checkpoint of the run whose adapter is loaded; by default the adapter is the one of `adapter`, or a new
            one, which does not change the model's outputs yet.
        weights: the weights of a model on the meta device. Without them an adapter on the meta device has no values.

    Raises:
        CheckpointError: the adapter is damaged or belongs to another base.
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
    source = str(folder or config.model.model)
    problem = "does not take this adapter" if folder is None else f"is not an adapter of {config.model.model}"
    with opening(source, source, problem):
        if folder is not None:
            with key_is_known():
                settings = LoraConfig.from_pretrained(str(folder))
            mask_only = mask_only_token(folder)
            settings.inference_mode = False
            settings.base_model_name_or_path = _base_name(config.model.model)
            check_base(folder, found, config.model.model)
        with contextlib.nullcontext() if weights is None else _stand_ins(model):
            peft = get_peft_model(model, settings)
        peft.peft_config["default"].base_model_name_or_path = _base_name(config.model.model)
        if folder is None and weights is not None:
            for name, weight in model.named_parameters():
                if MAGNITUDE in name:
                    weight.is_new = True  # computed from stand-ins
        if folder is not None and not on_meta:
            with restricted_loading():
                loaded = load_peft_weights(str(folder), device="cpu")
            result: Any = set_peft_model_state_dict(peft, loaded)
            left = [*result.unexpected_keys, *(name for name in result.missing_keys if ".lora_" in name)]
            if left:
                raise ValueError(f"{left[0]} is not in both the file and the model")
    if is_gemma(model):
        _share_between_towers(model)
    if mask_only is not None:
        restrict_to_masks(peft, mask_only)
    return Adapter(peft, _base_name(config.model.model), found, mask_only)


@contextlib.contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Context manager that replaces weights on the meta device by CPU tensors without memory, because PEFT creates an
    adapter on its layer's device."""
    placed: dict[int, nn.Parameter] = {}  # weights by id of the stand-in
    swapped: dict[int, nn.Parameter] = {}  # stand-ins by id of the weight
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
    """Share the adapter between DiffusionGemma's encoder and decoder, which are one text tower."""
    for encoder, decoder in zip(model.model.encoder.language_model.layers, model.model.decoder.layers, strict=True):
        twins = dict(encoder.named_modules())
        for name, module in decoder.named_modules():
            for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
                for adapter, factor in getattr(module, part, {}).items():
                    getattr(twins[name], part)[adapter].weight = factor.weight


def check_adapter(folder: Path, base: str) -> None:
    """Raise CheckpointError for a folder without a plain LoRA adapter, or one that names another base than `base`."""
    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(folder, f"is not a PEFT adapter: it needs {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    settings = read_config(folder / ADAPTER_CONFIG)
    check_plain(settings, folder / ADAPTER_CONFIG)
    named = settings.get("base_model_name_or_path")
    check_named_base(named, base, str(folder), compared=(folder / BASE).is_file())  # `check_base` compares


def fingerprint(model: Any, read: Callable[[str], torch.Tensor] | None = None) -> str:
    """Digest of the weights of a base that does not depend on their precision: a part of the embedding, and the norms,
    in bf16. `read` returns the values of a parameter by name, for a model on the meta device."""
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
    if targets and is_gemma(model):
        # Layers of the vision tower and of the self-conditioning block have the same names.
        linear = "|".join(targets)
        targets = rf"model\.(decoder|encoder\.language_model)\.layers\.\d+\.(self_attn|mlp)\.({linear})"
    alpha = config.model.lora_alpha or 1.0
    return LoraConfig(
        task_type=None if is_gemma(model) else "CAUSAL_LM",
        r=max(1, config.model.lora_rank),
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]  # PEFT accepts any number
        lora_dropout=config.model.lora_dropout,
        target_modules=targets,
        target_parameters=expert_stacks(model) if EXPERTS in names else None,
        use_dora=config.model.lora_dora,
    )


def expert_stacks(model: Any) -> list[str]:
    """Last two components of the names of stacked expert weights."""
    return sorted(
        {
            ".".join(name.split(".")[-2:])
            for layer in decoder_layers(model)
            for name, weight in layer.named_parameters()
            if weight.dim() == 3 and "experts." in name
        }
    )


def linear_layers(model: Any) -> set[str]:
    """Last components of the names of linear layers in the decoder layers."""
    return {
        name.rpartition(".")[2]
        for layer in decoder_layers(model)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }


def _check_target(model: Any, target: str) -> None:
    """Raise SettingError unless `target` is one of `linear_layers`, or EXPERTS in a model with stacked experts."""
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
    raise SettingError("lora_targets", f"{target}: {why}: choose from {', '.join(known)}")


def check_base(folder: Path, found: str | None, model: str) -> None:
    """Raise CheckpointError if an adapter's folder, in PEFT's or Megatron's layout, records another fingerprint of its
    base than `found`, the one of `model`. None is not compared."""
    path = next((folder / name for name in (BASE, ADAPTER_MANIFEST) if (folder / name).is_file()), None)
    if found is None or path is None:
        return
    recorded = read_config(path)
    if recorded.get("fingerprint") not in (None, found):
        base = recorded.get("base")
        name = base.get("name") if isinstance(base, dict) else base
        raise CheckpointError(folder, f"is an adapter of {name}, which has other weights than {model}")


def _base_name(model: str) -> str:
    """Name of the base in an adapter: a Hub id or an absolute path."""
    return str(Path(model).absolute()) if Path(model).exists() else model
