"""Imports of large libraries on first use, for files with declarations beside the maths that needs the library."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stand-in for a module in a file's globals, which is replaced by the module when it is first used.

        if TYPE_CHECKING:
            import numpy as np
        else:
            np = LazyModule("numpy", globals(), "np")

    Args:
        name: the module to import.
        namespace: the file's globals.
        alias: its name in the file, if it is not `name`.
    """

    def __init__(self, name: str, namespace: dict[str, Any], alias: str | None = None) -> None:
        super().__init__(name)
        self._namespace, self._alias = namespace, alias or name

    def __getattr__(self, attribute: str) -> Any:
        module = importlib.import_module(self.__name__)
        self._namespace[self._alias] = module
        return getattr(module, attribute)
