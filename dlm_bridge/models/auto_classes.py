"""Registration of the families with transformers' Auto classes, without importing transformers.

If transformers' Auto modules are imported already, registration is immediate. Otherwise an import hook waits for them:
a `sys.meta_path` finder lets the normal import machinery load `transformers.models.auto.configuration_auto` and
`.tokenization_auto`, and registers the families after each. It affects no other module.

transformers' model modules import the Auto modules, so a family's classes cannot exist at that time. AutoConfig and
AutoTokenizer get stand-ins that delegate to the family's classes on use. Model classes are registered when the first
config object of their family is created (`models.hub_config`), before an Auto class can look for them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dlm_bridge.models.families import FamilySpec, families
from dlm_bridge.registration import warn_if_untested

CONFIGURATION_AUTO = "transformers.models.auto.configuration_auto"
TOKENIZATION_AUTO = "transformers.models.auto.tokenization_auto"


def install() -> None:
    """Register with transformers now if it is imported, else on its import. Idempotent."""
    for name, action in _ACTIONS.items():
        if name in sys.modules:
            action()
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def register_model_names() -> None:
    """Add the diffusion families' model classes to the module transformers under their Hub names, where its command
    line looks for them (`getattr(transformers, config.architectures[0])`)."""
    import transformers

    for family in families():
        own = family.kind == "diffusion" and not family.native
        for name in family.architectures if own else ():
            if not hasattr(transformers, name):
                setattr(transformers, name, _model_stand_in(family, name))


def _model_stand_in(family: FamilySpec, name: str) -> type:
    """Stand-in that loads through AutoModelForCausalLM, or through the family's class if it is not registered
    there."""

    class StandIn:
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            from transformers import AutoModelForCausalLM

            model_class = AutoModelForCausalLM if family.auto_classes else family.load("model_class")
            return model_class.from_pretrained(*args, **kwargs)

    StandIn.__name__ = name
    return StandIn


def _register_configs() -> None:
    warn_if_untested("torch")
    warn_if_untested("transformers")
    auto = sys.modules[CONFIGURATION_AUTO]
    # If families share a model type, the config of the first one dispatches on `architectures`. A family with
    # `told_from` must not be the first, because its config accepts every dict.
    own_configs_first = sorted(families(), key=lambda family: family.told_from is not None)
    for family in reversed(own_configs_first):
        for model_type in (family.model_type, *family.other_model_types):
            if family.auto_classes and model_type:
                auto.AutoConfig.register(model_type, _config_stand_in(family, model_type), exist_ok=True)


def _register_tokenizers() -> None:
    auto = sys.modules[TOKENIZATION_AUTO]
    for family in families():
        if family.tokenizer_class:
            # Found by name, so that a folder with a tokenizer needs no config.json.
            tokenizer_class = _tokenizer_stand_in(family)
            stand_in = _config_stand_in(family, family.model_type)
            auto.AutoTokenizer.register(stand_in, tokenizer_class=tokenizer_class, exist_ok=True)


def _config_stand_in(family: FamilySpec, model_type: str) -> type:
    """Stand-in for the family's config class, under one of its model types."""
    from transformers.configuration_utils import PreTrainedConfig

    class StandIn(PreTrainedConfig):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return family.load("config_class")(*args, **kwargs)

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            return family.load("config_class").from_dict(config_dict, **kwargs)

    StandIn.model_type = model_type
    StandIn.__name__ = family.config_class.partition(":")[2]  # transformers finds model types by class name
    return StandIn


def _tokenizer_stand_in(family: FamilySpec) -> type:
    """Stand-in for the family's tokenizer class."""

    class StandIn:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return family.load("tokenizer_class")(*args, **kwargs)

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return family.load("tokenizer_class").from_pretrained(*args, **kwargs)

    StandIn.__name__ = family.tokenizer_class.partition(":")[2]  # transformers finds tokenizers by class name
    return StandIn


_ACTIONS: dict[str, Callable[[], None]] = {
    CONFIGURATION_AUTO: _register_configs,
    TOKENIZATION_AUTO: _register_tokenizers,
}


class _AfterImport:
    """Meta path finder that runs an action after the normal machinery has loaded a module."""

    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _ACTIONS or fullname in self._busy:
            return None
        self._busy.add(fullname)  # prevents recursion
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _ACTIONS[fullname])  # type: ignore[assignment]
        return spec


class _Loader:
    """Loader that delegates to the original one, then runs an action."""

    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action()
