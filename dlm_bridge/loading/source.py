"""Loading of a model to train: whole, without weights, in parts, or for the Megatron engine."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.bridge import Bridge
from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.huggingface import HubCheckpoint
from dlm_bridge.convert.checkpoints.in_memory import stored_tensors
from dlm_bridge.errors import CheckpointError, DlmBridgeError, MissingExtraError, SettingError, printable
from dlm_bridge.files.reading import opening, reading
from dlm_bridge.hub import ADAPTER_CONFIG, CONFIG_FILE, TRACKER, from_hub, quantization_method, resolve
from dlm_bridge.loading.lazy import LazyWeights, NotInRangesError
from dlm_bridge.loading.pretrained import (
    check_exists,
    check_weights,
    find_config,
    load_hub_model,
    log_unused,
    model_without_weights,
    read_generation_config,
)

logger = logging.getLogger(__name__)
_ANEW = ": set `from_scratch` to train a new model"


@dataclass(frozen=True)
class StartingModel:
    """Initial model of a run.

    Args:
        model: model with its weights, or on the meta device (apart from computed buffers) if `weights` is set. If FSDP
            cannot read a checkpoint in parts, the main process has the weights, the others the meta device.
        weights: checkpoint of which every process reads its shards; None: `model` has the weights.
    """

    model: Any
    weights: LazyWeights | None = None


@dataclass(frozen=True)
class MegatronSource:
    """Initial model of a Megatron run: `bridge` to the checkpoint of its weights, and `model`, the Hub model on the
    meta device, for family, config and sizes."""

    bridge: Bridge
    model: Any


@dataclass(frozen=True)
class ModelSource:
    """Source of a model to train. Every method raises CheckpointError for a checkpoint that does not load.

    Args:
        path: a Hub folder or id, a Megatron checkpoint, or with `seed` the folder of a config.json.
        family: name of the family, if the config does not identify it.
        seed: seed of weights that are initialised by the family's rule; None: weights are loaded.
        mask_token_id: replaces the config's; saved with every checkpoint.
        dtype: dtype of loaded weights. Initialised weights are fp32.
        quantize: "4bit" or "8bit": linear layers are quantized with bitsandbytes.
    """

    path: str
    family: str | None = None
    seed: int | None = None
    mask_token_id: int | None = None
    dtype: torch.dtype = torch.float32
    quantize: str | None = None

    def load(self) -> Any:
        """Load the whole PreTrainedModel."""
        self.check_quantization()
        if self.seed is not None:
            self._class_and_config()  # refuses a config of another family than the named one
            model: Any = self._bridge().build_hf_model(torch.float32)
        elif self._is_megatron:
            model = self._bridge().build_hf_model(self.dtype)
        else:
            folder, quantization = self._folder(), self._quantization()
            model, _ = load_hub_model(folder, self.path, self.family, self.dtype, _ANEW, **quantization)
        self._set_mask_token(model.config)
        return model

    def empty(self) -> Any:
        """Create the PreTrainedModel on the meta device, from config.json alone."""
        model_class, hub_config = self._class_and_config()
        with torch.device("meta"), reading(self.path, "the model cannot be built from its config"):
            return model_class(hub_config)

    def in_parts(self, main: bool) -> StartingModel:
        """Create the model without weights, and open its checkpoint for reading by parts. If its tensors cannot be
        read in parts, the `main` process loads the whole model and logs the reason."""
        try:
            return self._lazy()
        except NotInRangesError as reason:
            if main:
                logger.warning(printable(f"{self.path}: the main process loads the whole model: {reason}"))
        return StartingModel(self.load() if main else self.empty())

    def megatron(self, checkpoint: Path | None = None) -> MegatronSource:
        """Open the model for the Megatron engine; `checkpoint`: the run's own checkpoint, to resume from."""
        if checkpoint is not None:
            bridge = Bridge.from_megatron(checkpoint)
        elif self.seed is None and (Path(self.path).parent / TRACKER).is_file():
            raise CheckpointError(self.path, f"one iteration of a Megatron checkpoint: use its parent, with {TRACKER}")
        else:
            bridge = self._bridge()
        model_class, hub_config = self._megatron_class_and_config(bridge)
        with torch.device("meta"), reading(self.path, "the model cannot be built from its config"):
            model = model_class(hub_config)
        if (folder := bridge.checkpoint.hub.folder) is not None:
            with opening(folder, self.path, "does not load"):
                read_generation_config(model, folder)
        return MegatronSource(bridge, model)

    @property
    def _is_megatron(self) -> bool:
        return self.seed is None and (Path(self.path) / TRACKER).is_file()

    def _bridge(self) -> Bridge:
        if self.seed is not None:
            return Bridge.from_scratch(self.path, self.seed, self.family)
        if self._is_megatron:
            return Bridge.from_megatron(self.path, family=self.family)
        return Bridge.from_hf(self.path, family=self.family)

    def _check_place(self) -> None:
        check_exists(self.path)
        if (Path(self.path) / ADAPTER_CONFIG).is_file():
            raise SettingError("model", f"{self.path} is an adapter: set `adapter` to it, and `model` to its base")
        if quantization_method(Path(self.path)) == "compressed-tensors":
            raise CheckpointError(self.path, "its weights are quantised: train the checkpoint that it was made from")

    def _folder(self) -> Path:
        """Folder of a Hub model; a Hub id is downloaded."""
        self._check_place()
        if Path(self.path).is_dir():
            return Path(self.path)
        find_config(self._config_folder(), self.path, self.family)  # before weights are downloaded
        return resolve(self.path)

    def _config_folder(self) -> Path:
        """Folder of a Hub model's config.json; nothing else of a Hub id is downloaded."""
        from huggingface_hub import hf_hub_download

        def fetch(local: bool) -> Path:
            return Path(hf_hub_download(self.path, CONFIG_FILE, local_files_only=local)).parent

        self._check_place()
        if Path(self.path).is_dir():
            check_weights(Path(self.path), self.path, _ANEW)
            return Path(self.path)
        return from_hub(fetch, self.path, f"its {CONFIG_FILE}")

    def _class_and_config(self) -> tuple[Callable[[Any], Any], Any]:
        """Factory of the model, and the configuration object to call it with."""
        from transformers import AutoModelForCausalLM

        if self._is_megatron:
            return self._megatron_class_and_config(self._bridge())
        folder = Path(self.path) if self.seed is not None else self._config_folder()
        spec, hub_config = find_config(folder, self.path, self.family)
        self._set_mask_token(hub_config)
        return (AutoModelForCausalLM.from_config if spec is None else spec.load("model_class")), hub_config

    def _megatron_class_and_config(self, bridge: Bridge) -> tuple[Callable[[Any], Any], Any]:
        """Factory and configuration object of the model behind `bridge`."""
        with reading(self.path, "the model cannot be built from its config"):
            hub_config = bridge.family.load("config_class").from_dict(bridge.config)
        hub_config.name_or_path = bridge.code_place
        self._set_mask_token(hub_config)
        return bridge.family.load("model_class"), hub_config

    def _set_mask_token(self, hub_config: Any) -> None:
        if self.mask_token_id is not None:
            hub_config.mask_token_id = self.mask_token_id

    def _lazy(self) -> StartingModel:
        """Create the model without weights, and open the checkpoint to read them from. Raises NotInRangesError if only
        transformers' own loading can read the checkpoint."""
        folder, bridge = None, None
        checkpoint: Checkpoint
        if self.seed is not None or self._is_megatron:
            bridge = self._bridge()
            checkpoint = bridge.checkpoint
            checkpoint.check()
        else:
            folder = self._folder()
            check_weights(folder, self.path, _ANEW)
            try:
                checkpoint = HubCheckpoint(folder)
            except DlmBridgeError as error:
                raise NotInRangesError(str(error)) from error
        if bridge is None or self.seed is not None:
            model_class, hub_config = self._class_and_config()
        else:
            model_class, hub_config = self._megatron_class_and_config(bridge)
        if getattr(hub_config, "quantization_config", None) is not None:
            raise NotInRangesError("its weights are quantized")
        with reading(self.path, "the model cannot be built from its config"):
            model = model_without_weights(model_class, hub_config, self.dtype)
        if folder is not None:
            with opening(folder, self.path, "does not load"):
                read_generation_config(model, folder)
        weights = LazyWeights(model, checkpoint)
        if folder is not None and weights.unused:  # `check` accounts for the tensors of other checkpoints
            # A second copy of a tied weight, or a tensor that a model of this package does not have: transformers'
            # loading decides.
            if hasattr(model, "family") or not model.state_dict().keys().isdisjoint(weights.unused):
                raise NotInRangesError(f"{weights.unused[0]} is not a tensor of the model")
            log_unused(self.path, weights.unused)
        for name, tensor in stored_tensors(model):  # tensors that transformers does not cast, such as routers
            for pattern, dtype in model._get_dtype_plan(self.dtype).items():
                if re.search(pattern, name):
                    tensor.data = tensor.data.to(dtype or weights.stored_dtype(name))
        return StartingModel(model.eval(), weights)

    def check_quantization(self) -> None:
        """Raise SettingError or MissingExtraError if the model cannot be quantized."""
        if self.quantize is None:
            return
        if self._is_megatron:
            raise SettingError("lora_quantize", f"{self.path} is a Megatron checkpoint: export it first")
        if importlib.util.find_spec("bitsandbytes") is None:
            raise MissingExtraError("lora_quantize", "needs bitsandbytes: pip install 'dlm-bridge[quantize]'")

    def _quantization(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` that quantize the weights on this process's device."""
        if self.quantize is None:
            return {}
        from transformers import BitsAndBytesConfig

        settings = BitsAndBytesConfig(load_in_8bit=True)
        if self.quantize == "4bit":
            settings = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=self.dtype,
            )
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else "cpu"
        return {"quantization_config": settings, "device_map": {"": device}}
