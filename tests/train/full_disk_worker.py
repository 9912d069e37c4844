"""`dlm-bridge WORDS...`, whose files may not grow beyond FILE_SIZE bytes while the checkpoint of step 4 is written."""

from __future__ import annotations

import os
import resource
from typing import Any

from dlm_bridge.cli.app import main
from dlm_bridge.train.trainer import Trainer


def limit_saves(size: int) -> None:
    save = Trainer.save

    def limited(self: Any, step: int, metrics: Any) -> Any:
        if step != 4:
            return save(self, step, metrics)
        if hasattr(self, "checkpoints"):
            self.checkpoints.finish()  # of the step before
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        save(self, step, None)
        if hasattr(self, "checkpoints"):
            self.checkpoints.finish()
        raise AssertionError("was written")

    Trainer.save = limited  # type: ignore[method-assign]


if __name__ == "__main__":
    if "FILE_SIZE" in os.environ:
        limit_saves(int(os.environ["FILE_SIZE"]))
    main()
