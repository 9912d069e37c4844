"""A model that nobody has trained yet, as a checkpoint: each tensor is made when it is read."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dlm_bridge.convert.checkpoint import HubSide, open_family
from dlm_bridge.convert.hub import read_config
from dlm_bridge.convert.hub_checkpoint import CONFIG, ByNameCheckpoint
from dlm_bridge.convert.side_files import list_side_files
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.initialisation import Rule, initialise


class InitialCheckpoint(ByNameCheckpoint):
    """A folder with a config.json, and the fp32 values that its family's rule gives each tensor from (seed, Hub name).

    Raises DlmBridgeError where there is no config.json, or one that no family can hold or initialise.
    """

    format = "initial"

    def __init__(self, folder: str | os.PathLike[str], seed: int, family: str | None = None) -> None:
        self.folder, self.seed = Path(folder), seed
        path = self.folder / CONFIG
        if not path.is_file():
            raise DlmBridgeError(f"--model {self.folder}: --from-scratch needs a folder with a config.json")
        config = read_config(path)
        spec = open_family(config, family, str(path))
        files = list_side_files(self.folder, ())
        hub = HubSide(
            family=spec,
            config=config,
            source={"name": str(self.folder.absolute()), "revision": None},
            folder=self.folder,
            files=files.carried,
            left_out=files.left_out,
        )
        super().__init__(str(self.folder), hub)
        self._drop_absent_mtp(lambda link: False)  # transformers' models do not have these layers
        self._rule: Rule = spec.load("initialisation")(config)
        self._stored = {name: (torch.float32, shape) for name, shape in self._expected()}
        hub.dtypes = {name: dtype for name, (dtype, _) in self._stored.items()}

    def _tensor(self, name: str) -> torch.Tensor:
        return initialise(name, self._stored[name][1], self._rule(name), self.seed)

    def folders(self) -> list[Path]:
        return [self.folder]
