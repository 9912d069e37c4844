"""What the proof of the Megatron engine is about: tiny models, every objective, layouts, and their runs' options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.data import IndexedWriter, token_dtype
from tests.interop.cases import Model, models

LENGTH, SAMPLES, MASK, TOKENS = 16, 4, 99, 97  # tokens a row, rows a step, the mask token, the data's vocabulary


@dataclass(frozen=True)
class Subject:
    """A model under an objective."""

    objective: str
    model: str
    config: dict[str, Any] = field(default_factory=dict)  # of config.json, besides the model's
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def experts(self) -> bool:
        return self.build().has_experts

    def build(self) -> Model:
        model = models()[self.model]
        return Model({**model.config, "mask_token_id": MASK, **self.config}, model.build, model.family)


# LLaDA's vocabulary of 125 is padded at tp 2; the tied one's output layer is the first stage's embedding.
SUBJECTS = {
    "masked": Subject("masked", "odd_vocabulary"),
    "masked-tied": Subject("masked_fraction", "tied"),
    "masked-moe": Subject("masked", "llada_moe"),
    "shifted": Subject("shifted", "dream"),
    "shifted-cart": Subject("shifted_cart", "dream"),
    "block": Subject("block", "sdar"),
    "block-tied": Subject("block_levels", "sdar-trado", {"block_size": 8}),
    "block-moe": Subject("block", "sdar_moe"),
    "block-shared-experts": Subject("block", "llada2_moe", {"block_size": 4}),
    "complementary": Subject("block_complementary", "fast_dllm_v2-tied"),
    "wedlm": Subject("wedlm", "wedlm"),
    "causal": Subject("causal", "qwen2"),
    "causal-moe": Subject("causal", "mixtral"),
    # Auxiliary losses whose sums do not depend on which rows run together.
    "balanced-moe": Subject(
        "masked", "llada_moe", options={"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01, "length_variation": 0.0}
    ),
}

SP = {"tp": 2}  # sequence parallelism is on by itself
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp": 2, "sequence_parallel": False},
    "tp2-sp": SP,
    "pp2": {"pp": 2},
    "pp2-vp2": {"pp": 2, "vp": 2},
    "cp2": {"cp": 2},
    "ep2": {"ep": 2},
    "etp2": {"etp": 2},
    "tp2-etp1-sp": {"tp": 2, "etp": 1},
}
# On four processes.
LARGE: dict[str, dict[str, Any]] = {
    "ep2-tp2-sp": {"ep": 2, "tp": 2},
    "ep2-tp2-sp-allgather": {"ep": 2, "tp": 2, "moe_dispatcher": "allgather"},
    "ep2-tp2-etp1-sp": {"ep": 2, "tp": 2, "etp": 1},
    "ep2-pp2": {"ep": 2, "pp": 2},
    "ep2-cp2": {"ep": 2, "cp": 2},
    "tp2-sp-pp2": {"tp": 2, "pp": 2},
    "tp2-sp-cp2": {"tp": 2, "cp": 2},
    "pp2-cp2": {"pp": 2, "cp": 2},
}


@dataclass(frozen=True)
class Cell:
    """A subject, its rows packed or not, in a layout."""

    subject: str
    packed: bool
    layout: str

    @property
    def row(self) -> str:
        return self.subject + ("-packed" if self.packed else "")

    def __str__(self) -> str:
        return f"{self.row}[{self.layout}]"


@cache
def cells(processes: int) -> list[Cell]:
    """Every cell on so many processes."""
    return list(_cells(LAYOUTS if processes == 2 else LARGE))


def _cells(layouts: dict[str, dict[str, Any]]) -> Iterator[Cell]:
    for layout, options in layouts.items():
        for name, subject in SUBJECTS.items():
            if ("ep" in options or "etp" in options) and not subject.experts:
                continue
            yield Cell(name, False, layout)
            if name != "balanced-moe":
                yield Cell(name, True, layout)


class Files:
    """Paths below the folder that the tests and the processes share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def corpus(self) -> Path:
        """The prefix of a pair of token ids, documents of 3 to 20 tokens."""
        return self.root / "corpus"

    def hub(self, subject: str) -> Path:
        return self.root / "hub" / subject

    def reference(self, row: str) -> Path:
        """What one process computes."""
        return self.root / f"reference_{row}.pt"

    def write(self) -> None:
        for name, subject in SUBJECTS.items():
            subject.build().write(self.hub(name))
        generator = np.random.default_rng(1)
        lengths = generator.integers(3, 20, 60)
        with IndexedWriter(self.corpus, token_dtype(TOKENS)) as writer:
            writer.add(generator.integers(3, TOKENS, int(lengths.sum())), lengths.tolist())

    def config(self, cell: Cell, **changes: Any) -> TrainConfig:
        """One step of plain gradient descent, so that what moved is the gradient."""
        subject = SUBJECTS[cell.subject]
        values: dict[str, Any] = {
            "engine": "megatron",
            "model": str(self.hub(cell.subject)),
            "family": subject.build().family,
            "data": [str(self.corpus)],
            "output": str(self.root / "run"),
            "objective": subject.objective,
            "steps": 1,
            "global_batch_size": SAMPLES,
            "micro_batch_size": 1,
            "seq_length": LENGTH,
            "length_variation": 0.5,
            "document_attention": cell.packed,
            "split": "80,20,0",
            "optimizer": "sgd",
            "lr": 16.0,
            "lr_schedule": "constant",
            "clip_grad": 0.0,
            "weight_decay": 0.0,
            **subject.options,
            **(LAYOUTS | LARGE | {"one": {}})[cell.layout],
            **changes,
        }
        return TrainConfig(**values)
