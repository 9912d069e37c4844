"""HubConfig: base of the families' configs, which saves the keys and values that were read from the Hub."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from dlm_bridge.models.decoder_mapping import NO_WINDOW, require_values
from dlm_bridge.models.families import FamilySpec, find_family
from dlm_bridge.models.rope import rope_theta_form

# Attributes of the class or the process, not of the checkpoint.
RUNTIME_KEYS = ("is_causal", "name_or_path")
STANDARD_NAMES = ("intermediate_size", "num_key_value_heads", "head_dim")


class HubConfig(PreTrainedConfig):
    """Config that keeps the source's keys in `save_pretrained`. (transformers 5 renames `torch_dtype`, moves
    `rope_theta` into `rope_parameters` and drops keys that equal its defaults, after which the original remote code
    fails.)

    Saves the source with the values that changed since it was loaded. A mixin before one of transformers' config
    classes (`class SDARConfig(HubConfig, Qwen3Config)`), or a base class alone.
    """

    family: ClassVar[FamilySpec]
    is_causal: ClassVar[bool] = False  # makes transformers build bidirectional masks
    required_values: ClassVar[dict[str, Any]] = {}  # the only values of these fields that the model class supports
    slides: ClassVar[bool] = False  # the model class supports sliding windows
    auto_map: ClassVar[dict[str, Any]] = {}  # libraries expect it in classes outside transformers

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Dispatch on `architectures`, since families can share a `model_type`. Raises CheckpointError for an unknown
        architecture."""
        # A family without architectures of its own was chosen by name.
        if config_dict.get("architectures") and cls.family.architectures:
            where = f"{kwargs.get('name_or_path') or config_dict.get('_name_or_path') or 'config.json'}"
            config_class = find_family(config_dict, where=where).load("config_class")
            if config_class is not cls:
                return config_class.from_dict(config_dict, **kwargs)
        if any(own in config_dict for own in cls.attribute_map.values()):  # drop the names that `to_dict` adds
            views = {name for name in cls._view_names() if cls.attribute_map.get(name, "model_type") in config_dict}
            config_dict = {key: value for key, value in config_dict.items() if key not in views}
        source = copy.deepcopy(config_dict)
        # The attention kernel of the original code; the loader chooses the one to use.
        config_dict = {key: value for key, value in config_dict.items() if key != "attn_implementation"}
        loaded = super().from_dict(copy.deepcopy(config_dict))._plain()
        result = super().from_dict(config_dict, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        config._source, config._loaded = source, loaded
        return result

    def __post_init__(self, **kwargs: Any) -> None:
        if self.__dict__.get("head_dim", 0) is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        required = self.required_values if self.slides else {**NO_WINDOW, **self.required_values}
        require_values({key: getattr(self, key, None) for key in required}, required)
        super().__post_init__(**kwargs)
        _register_model_class(self.family)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register_model_class(self.family)

    def to_dict(self) -> dict[str, Any]:
        """Dict for libraries: the Hub's keys and values, transformers' standard names (`hidden_size`,
        `num_attention_heads`, ...) where the Hub uses others, and where the config was loaded from."""
        views = {name: getattr(self, name, None) for name in self._view_names()}
        return {"_name_or_path": self.name_or_path, **views, **self.to_diff_dict()}

    @classmethod
    def _view_names(cls) -> list[str]:
        """Standard names that are aliases of a field, or properties computed from several."""
        computed = [name for name in STANDARD_NAMES if isinstance(getattr(cls, name, None), property)]
        return [*cls.attribute_map, *computed]

    def to_diff_dict(self) -> dict[str, Any]:
        """Content of config.json: the Hub's keys and values."""
        now = self._plain()
        source, loaded = self.__dict__.get("_source"), self.__dict__.get("_loaded", {})
        if source is None:
            defaults = _transformers_defaults()
            written = {key: value for key, value in now.items() if key not in defaults or value != defaults[key]}
            return _with_hub_names(written, {})
        changed = {key: value for key, value in now.items() if key not in loaded or value != loaded[key]}
        names = [*(source.get("architectures") or [""]), *(changed.get("architectures") or [""])]
        if set(names) <= set(self.family.architectures):
            del changed["architectures"]  # two names of one class
        kept = {key: value for key, value in copy.deepcopy(source).items() if not key.startswith("_")}
        return kept | _with_hub_names(changed, source)

    def _plain(self) -> dict[str, Any]:
        """transformers' dict without private and runtime keys."""
        view = super().to_dict()
        return {key: value for key, value in view.items() if not key.startswith("_") and key not in RUNTIME_KEYS}


@cache
def _register_model_class(family: FamilySpec) -> None:
    """Register a family's model class with its Auto classes, which find it by the type of the config."""
    import transformers

    for name in family.auto_classes:
        getattr(transformers, name).register(family.load("config_class"), family.load("model_class"), exist_ok=True)


def _with_hub_names(values: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    """Values under the source's keys, else under those that the original code, vLLM and SGLang read."""
    if "dtype" in values and "dtype" not in source:
        values["torch_dtype"] = values.pop("dtype")
    return values if "rope_parameters" in source else rope_theta_form(values)


@cache
def _transformers_defaults() -> dict[str, Any]:
    defaults = PreTrainedConfig().to_dict()
    del defaults["transformers_version"]
    return defaults
