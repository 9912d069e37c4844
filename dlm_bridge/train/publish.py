"""Upload of a finished run's best or last checkpoint to the Hub."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dlm_bridge.convert.checkpoints import open_checkpoint
from dlm_bridge.convert.lora import export_adapter, is_megatron_adapter, open_adapter
from dlm_bridge.convert.push import create_repository, push
from dlm_bridge.convert.settings import HubSettings
from dlm_bridge.convert.transfer import write_hub
from dlm_bridge.distributed import is_main
from dlm_bridge.errors import printable
from dlm_bridge.hub import ADAPTER_CONFIG, CONFIG_FILE
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.output import RunEnd

logger = logging.getLogger(__name__)


def check_push(config: TrainConfig) -> None:
    """Create the repository of `push_to_hub` before the run, which needs a token with write access. Raises
    SettingError, ResourceError."""
    if config.checkpoint.push_to_hub is not None and is_main():
        create_repository(config.checkpoint.push_to_hub, config.checkpoint.hub_private, field="push_to_hub")


def publish(config: TrainConfig, end: RunEnd) -> None:
    """Upload the best checkpoint of a finished run, without early stopping the last one, to `push_to_hub`. A Megatron
    checkpoint is exported for that. Raises the errors of `push`."""
    repo_id = config.checkpoint.push_to_hub
    if repo_id is None or not end.finished or not is_main():
        return
    checkpoint = end.best or end.folder
    with _hub_folder(config, checkpoint) as folder:
        report = push(folder, repo_id, private=config.checkpoint.hub_private, run=checkpoint)
    logger.warning("%s", printable(f"uploaded {len(report.files)} files: {report.commit}"))


@contextlib.contextmanager
def _hub_folder(config: TrainConfig, folder: Path) -> Iterator[Path]:
    """Context manager that yields a Hub folder or PEFT folder with the weights of a checkpoint."""
    if _is_hub_folder(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(dir=config.checkpoint.output, prefix=".push-") as temporary:
        target = Path(temporary) / "hub"
        if is_megatron_adapter(folder):
            base = open_checkpoint(config.model.model, family=config.model.family)
            export_adapter(open_adapter(folder, base), base, target)
        else:
            write_hub(open_checkpoint(folder), target, HubSettings())
        yield target


def _is_hub_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG_FILE, ADAPTER_CONFIG))
