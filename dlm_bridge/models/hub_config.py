"""The base of every family's configuration: what was read from the Hub is what is written back, key for key."""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from dlm_bridge.models import find_family
from dlm_bridge.models.spec import FamilySpec


class HubConfig(PreTrainedConfig):
    """Keeps the source's keys through `save_pretrained`: transformers 5 renames `torch_dtype`, moves `rope_theta` into
    `rope_parameters` and drops keys that equal its own defaults, and the original remote code then fails."""

    family: ClassVar[FamilySpec]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Dispatch on `architectures`, since two families can share a `model_type`. Raises DlmBridgeError where that
        names a family that this package does not have."""
        # Saved by transformers with an empty list or nothing: there is nothing to dispatch on, and the class is known.
        if config_dict.get("architectures"):
            where = f"{kwargs.get('name_or_path') or config_dict.get('_name_or_path') or 'config.json'}"
            spec = find_family(config_dict, where=where)
            config_class = spec.load("config_class")
            if config_class is not cls:
                return config_class.from_dict(config_dict, **kwargs)
        source = copy.deepcopy(config_dict)
        result = super().from_dict(config_dict, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        config._source = source
        return result

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # The Auto classes look model classes up by the type of a configuration object, so one exists by then.
        from dlm_bridge.registration import register_models

        register_models(self.family)

    def to_dict(self) -> dict[str, Any]:
        return self._as_on_the_hub(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        """What goes to config.json: the same, since `to_dict` has no key that only transformers knows."""
        return self.to_dict()

    def _as_on_the_hub(self, written: dict[str, Any]) -> dict[str, Any]:
        source: dict[str, Any] | None = written.pop("_source", None)
        known = source or {}
        rope = written.pop("rope_parameters", None)
        if rope:
            written["rope_theta"] = rope["rope_theta"]
        # The original code, vLLM and SGLang read `torch_dtype`.
        if "dtype" in written and "dtype" not in known:
            written["torch_dtype"] = written.pop("dtype")
        # A default that the source did not spell out stays unsaid: all of them where there is a source, else those
        # that are transformers' own.
        defaults = _transformers_defaults() if source is None else self._defaults()
        for key in [key for key in written if key not in known and key in defaults]:
            if written[key] == defaults[key]:
                del written[key]
        written.pop("_name_or_path", None)
        if "is_causal" not in known:  # a fact of the class that transformers copies to the instance
            written.pop("is_causal", None)
        for key, value in known.items():
            if key == "transformers_version" or (key == "torch_dtype" and key not in written):
                written[key] = value
            elif key not in written and not key.startswith("_"):
                current = getattr(self, key, value)
                written[key] = value if _unchanged(current, value) else current
        return written

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        own = {f.name: f.default for f in fields(cls)}
        return {**own, **_transformers_defaults()}


@cache
def _transformers_defaults() -> dict[str, Any]:
    return {**PreTrainedConfig().to_dict(), "torch_dtype": None, "transformers_version": None}


def _unchanged(current: Any, value: Any) -> bool:
    """Whether an attribute still means what the source said, also where transformers has made an object of it."""
    if isinstance(current, float) and isinstance(value, float) and math.isnan(current) and math.isnan(value):
        return True
    return bool(current == value) or not isinstance(current, str | int | float | bool | list | dict | type(None))
