"""Makes transformers' Auto classes know the families, without importing transformers before somebody else does.

If transformers' Auto modules are already imported, registration happens at once. Else one import hook waits for them:
a `sys.meta_path` finder that finds nothing itself, lets the normal import machinery load
`transformers.models.auto.configuration_auto` and `.modeling_auto`, and registers right after each has run. It touches
no other module and removes nothing.

Model classes are heavy (torch) and their bodies import the Auto classes in turn, so one that cannot be imported yet
(its body is just being imported) is registered when the first configuration object of its family is made, which is
before any Auto class can look for it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dlm_bridge.models import FAMILIES
from dlm_bridge.models.spec import FamilySpec

CONFIGURATION_AUTO = "transformers.models.auto.configuration_auto"
MODELING_AUTO = "transformers.models.auto.modeling_auto"

_registered: set[str] = set()


def install() -> None:
    """Register now where transformers is loaded, else when it is. Calling it again changes nothing."""
    for name, action in _ACTIONS.items():
        if name in sys.modules:
            action()
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def register_models(family: FamilySpec) -> None:
    """Register a family's model class with its Auto classes, once."""
    if family.name in _registered or not family.auto_classes:
        return
    import transformers

    config_class, model_class = family.load("config_class"), family.load("model_class")
    _registered.add(family.name)
    for name in family.auto_classes:
        getattr(transformers, name).register(config_class, model_class, exist_ok=True)


def _register_configs() -> None:
    auto = sys.modules[CONFIGURATION_AUTO]
    # Where families share a model type the first one's configuration dispatches on `architectures`.
    first = {family.model_type: family for family in reversed(FAMILIES) if family.auto_classes and family.model_type}
    for model_type, family in first.items():
        auto.AutoConfig.register(model_type, family.load("config_class"), exist_ok=True)


def _register_models() -> None:
    for family in FAMILIES:
        if not _being_imported("transformers.modeling_layers"):
            register_models(family)


def _being_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


_ACTIONS: dict[str, Callable[[], None]] = {CONFIGURATION_AUTO: _register_configs, MODELING_AUTO: _register_models}


class _AfterImport:
    """A meta path finder that runs an action after a module has been loaded by the normal machinery."""

    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _ACTIONS or fullname in self._busy:
            return None
        self._busy.add(fullname)  # the normal search must not come back here
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _ACTIONS[fullname])  # type: ignore[assignment]
        return spec


class _Loader:
    """Delegates to the real loader, then runs the action."""

    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action()
