"""Published models that can be planned without the Hub, by Hub id or by its last component."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from dlm_bridge.errors import CheckpointError
from dlm_bridge.hub import HUB_ID
from dlm_bridge.plan.model import PlannedModel, model_of, open_model
from dlm_bridge.settings import nearest

TABLE = Path(__file__).with_name("published.yaml")


def find_model(name: str, revision: str | None = None, family: str | None = None) -> PlannedModel:
    """Open a folder, a published model of the package's table, or a Hub id, in this order.

    A `revision` is always read from the Hub. Raises CheckpointError, which names the nearest published model.
    """
    hub_ids = published_models()
    hub_id = _by_word().get(name.lower())
    if hub_id is not None and revision is None and not Path(name).expanduser().exists():
        found = hub_ids[hub_id]
        return model_of(found["config"], hub_id, family or found.get("family"))
    try:
        return open_model(name, revision, family)
    except CheckpointError as error:
        hint = nearest(name.lower(), _by_word(), cutoff=0.8, shown=_by_word())
        if not hint or Path(name).expanduser().exists():
            raise
        if HUB_ID.fullmatch(name):
            raise CheckpointError(error.field, f"{error.reason}; {hint}") from None
        raise CheckpointError(name, f"no such folder, and not a Hub id (owner/name): {hint}") from None


@functools.cache
def published_models() -> dict[str, dict[str, Any]]:
    """Entries of the table by Hub id: `config`, and `family` where the config does not identify it."""
    import yaml

    entries = yaml.load(TABLE.read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["models"]
    return {name: entry for entry in entries for name in entry["names"]}


@functools.cache
def _by_word() -> dict[str, str]:
    """Hub ids by what may be typed, in lower case: the id and its last component."""
    return {word.lower(): name for name in published_models() for word in (name, name.rpartition("/")[2])}
