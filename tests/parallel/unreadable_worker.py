"""`dlm-bridge WORDS...` on several ranks, of which the last cannot read the tensors of a distributed checkpoint."""

from __future__ import annotations

import errno
import os
from typing import Any
from unittest.mock import patch

from dlm_bridge.cli.app import main


def refuse(*_: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


if __name__ == "__main__":
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        patch("torch.distributed.checkpoint.FileSystemReader.read_data", refuse).start()
    main()
