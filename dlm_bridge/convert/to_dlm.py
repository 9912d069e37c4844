"""An autoregressive Hub checkpoint becomes a diffusion one: a mask token, another model type, the same weights."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import HubSide, TensorSpec
from dlm_bridge.convert.engine import Options, write_hub
from dlm_bridge.convert.hub_checkpoint import CONFIG, ByNameCheckpoint, HubCheckpoint, open_hub
from dlm_bridge.convert.mapping import Vocabulary
from dlm_bridge.convert.mask_token import MaskToken, mask_token
from dlm_bridge.convert.pool import Progress
from dlm_bridge.convert.report import Report
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models import family_by_name
from dlm_bridge.models.initialisation import Normal, initialise
from dlm_bridge.models.spec import FamilySpec

# The autoregressive family -> the diffusion families whose tensors have the same names; the first is the default.
TARGETS: dict[str, tuple[str, ...]] = {
    "llama": ("a2d_llama",),
    "qwen2": ("a2d_qwen2",),
    "qwen3": ("a2d_qwen3", "sdar"),
    "qwen3_moe": ("rnd1", "sdar_moe"),
}
GENERATION = "generation_config.json"


def convert_to_dlm(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    mask: str | None = None,
    to: str | None = None,
    *,
    seed: int = 0,
    revision: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write the diffusion checkpoint that `source` (a Hub folder or id) becomes, ready for `pretrain`.

    `mask` is the mask token's text (see `mask_token`), `to` one of the family's `TARGETS`, which says the topology and
    the shift. The mask token's rows of the embedding and of the output layer, and rows that the vocabulary lacks, are
    noise drawn from (seed, tensor name). Raises DlmBridgeError for a family without a target, a tokenizer that cannot
    take the token, a source that is not whole and a refused output.
    """
    opened = open_hub(os.fspath(source), revision)
    target = _target(opened, to)
    token = mask_token(opened.folder, mask)
    checkpoint = _Converted(opened, target, token, seed)
    options = Options(None, workers, overwrite, dry_run, progress)
    report = write_hub(checkpoint, Path(output), options)
    report.action = "convert-to-dlm"
    rows = checkpoint.dims.vocab - opened.dims.vocab
    topology = target.topology.replace("_", "-")
    report.notes += [
        f"mask token {token.text} is id {token.id}, {'added to' if token.added else 'already in'} the tokenizer; its "
        "rows are noise",
        f"the vocabulary has {checkpoint.dims.vocab} rows" + (f", {rows} of them new" if rows else ""),
        f"{target.title}: {topology} attention, "
        + ("shifted: logits[i-1] predicts i" if target.shift else "no shift"),
    ]
    return report


def _target(source: HubCheckpoint, name: str | None) -> FamilySpec:
    family = source.family
    if family.kind == "diffusion":
        raise DlmBridgeError(f"{source.where} is a diffusion model already ({family.name})")
    if family.name not in TARGETS:
        raise DlmBridgeError(
            f"{source.where}: no diffusion family has the tensors of {family.name}: known are {', '.join(TARGETS)}"
        )
    names = TARGETS[family.name]
    if name is not None and name not in names:
        raise DlmBridgeError(f"--to {name}: {family.name} becomes {' or '.join(names)}")
    return family_by_name(name or names[0])


class _Converted(ByNameCheckpoint):
    """The source's tensors as the target family's, with the mask token's rows."""

    format = "huggingface"

    def __init__(self, source: HubCheckpoint, target: FamilySpec, token: MaskToken, seed: int) -> None:
        self._source, self._token, self._seed = source, token, seed
        texts = dict(token.files)
        config = _config(source, target, token)
        texts[CONFIG] = _text(config)
        if GENERATION in source.hub.files:
            texts[GENERATION] = _text(_generation(source.folder / GENERATION))
        # The rotary frequencies that the first Llama checkpoints store are no diffusion model's.
        self._left = {name for name, carried in source.carried.items() if not carried.in_model}
        shards = [
            replace(shard, tensors=tuple(name for name in shard.tensors if name not in self._left))
            for shard in source.hub.shards
        ]
        hub = HubSide(
            family=target,
            config=config,
            source=source.hub.source,
            folder=source.folder,
            files=tuple(name for name in source.hub.files if name not in texts),
            left_out=source.hub.left_out,
            texts=texts,
            shards=[shard for shard in shards if shard.tensors],
            carried=tuple(name for name in source.hub.carried if name not in self._left),
        )
        super().__init__(source.where, hub)
        old, new = source.dims.vocab, self.dims.vocab
        vocabulary = {n for link in self.links if isinstance(link.rule, Vocabulary) for n in link.hub_names}
        self._noisy = vocabulary | {n for n, carried in self.carried.items() if carried.copy_of in vocabulary}
        self._stored: dict[str, TensorSpec] = {}
        for name in source.reader.names:
            if name in self._left:
                continue
            dtype, shape = source.spec(name)
            self._stored[name] = (dtype, (new, *shape[1:]) if name in self._noisy and shape[0] == old else shape)

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._source.reader.read(name)
        if name not in self._noisy:
            return tensor
        old, (rows, hidden) = tensor.shape[0], self._stored[name][1]
        noise = Normal(float(self.config.get("initializer_range") or 0.02))
        carried = self.carried.get(name)  # a redundant tied head must stay the embedding's copy
        key = carried.copy_of if carried is not None else name

        def drawn(row: int) -> torch.Tensor:
            return initialise(f"{key}[{row}]", (hidden,), noise, self._seed).to(tensor.dtype)

        result = torch.cat([tensor, tensor.new_empty(rows - old, hidden)]) if rows > old else tensor
        for row in {self._token.id, *range(old, rows)}:
            result[row] = drawn(row)
        return result

    def folders(self) -> list[Path]:
        return self._source.folders()


def _config(source: HubCheckpoint, target: FamilySpec, token: MaskToken) -> dict[str, Any]:
    """The source's keys under the target's names. Remote code that the source names is not the target's."""
    config = {key: value for key, value in source.config.items() if key not in ("auto_map", "_name_or_path")}
    return {
        "pad_token_id": token.pad_id,  # a target's own default is another tokenizer's
        **config,
        "architectures": [target.architectures[0]],
        "model_type": target.model_type,
        "mask_token_id": token.id,
        "vocab_size": max(source.dims.vocab, token.id + 1),
    }


def _generation(path: Path) -> dict[str, Any]:
    """Only the token ids: how to sample is the diffusion family's own."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        raise DlmBridgeError(f"{path}: is not valid JSON") from None
    if not isinstance(found, dict):
        raise DlmBridgeError(f"{path}: is not a JSON object")
    return {key: value for key, value in found.items() if key.endswith("_token_id")}


def _text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
