"""What the proof of the Megatron engine is about: tiny models, every objective, layouts, and their runs' options."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlm_bridge.data.indexed import IndexedWriter, token_dtype
from tests.checkpoints import write_tokenizer
from tests.interop.cases import PREDICTING, Model, models

LENGTH, SAMPLES, MASK, TOKENS = 16, 4, 99, 97  # tokens a row, rows a step, the mask token, the data's vocabulary


@dataclass(frozen=True)
class Subject:
    """A model under an objective."""

    objective: str
    model: str
    config: dict[str, Any] = field(default_factory=dict)  # of config.json, besides the model's
    options: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)  # options of a layout, besides the layout's

    @property
    def experts(self) -> bool:
        return self.build().has_experts

    def build(self) -> Model:
        model = models()[self.model]
        return Model({**model.config, "mask_token_id": MASK, **self.config}, model.build, model.family)


# LLaDA's vocabulary of 125 is padded at tp 2; the tied one's output layer is the first stage's embedding.
SUBJECTS = {
    "masked": Subject("masked", "odd_vocabulary"),
    "masked-tied": Subject(
        "masked_fraction", "tied", options={"certainty_weight": 2.0, "certainty_temperature": 0.5, "z_loss_coeff": 0.3}
    ),
    "masked-moe": Subject("masked", "llada_moe"),
    "shifted": Subject("shifted", "dream"),
    "shifted-moe": Subject("shifted_cart", "rnd1"),
    "block": Subject("block", "sdar"),
    "block-tied": Subject("block_levels", "sdar-trado", {"block_size": 8}),
    "block-moe": Subject("block", "llada2_moe", {"block_size": 4}),  # shared experts, a dense layer, an expert bias
    "complementary": Subject("block_complementary", "fast_dllm_v2-tied"),
    "wedlm": Subject("wedlm", "wedlm"),
    "idlm": Subject("idlm", "sdar", {"use_regular_causal": True, "block_size": 3}, options={"auto_balance": True}),
    "scaled-queries": Subject("nemotron", "nemotron_labs_diffusion-beyond-context", {"dlm_loss_weight": 0.3}),
    "causal": Subject("causal", "qwen2", options={"z_loss_coeff": 0.001}),
    "causal-moe": Subject("causal", "mixtral"),
    "latent": Subject("causal", "deepseek_v3"),
    "predicting": Subject("causal", PREDICTING, options={"mtp_loss_scaling_factor": 0.5, "z_loss_coeff": 0.2}),
    "predicting-latent": Subject("causal", "deepseek_v3", {"num_nextn_predict_layers": 2}),
    "predicting-ling": Subject("causal", "bailing_moe_v2", {"num_nextn_predict_layers": 1}),
    # Auxiliary losses whose sums do not depend on which rows run together.
    "balanced-moe": Subject(
        "masked", "llada_moe", options={"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01, "length_variation": 0.0}
    ),
    # The layers gather keys and values; experts with biases are not split.
    "sinks": Subject("causal", "gpt_oss", parallel={"etp": 1, "cp_comm_type": "allgather"}),
    # Plain gradient descent on the bound would overflow: single weights are in the hundreds.
    "uniform": Subject("uniform", "odd_vocabulary", options={"loss_weighting": "clipped", "z_loss_coeff": 0.3}),
    "uniform-tied": Subject("uniform_hybrid", "tied"),
}

# On two processes; those that a layout does not cut are data parallel.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp": 2, "sequence_parallel": False},
    "tp2-sp": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2-vp2": {"pp": 2, "vp": 2},
    "cp2": {"cp": 2},
    "ep2": {"ep": 2},
    "etp2": {"etp": 2},
    "tp2-etp1-sp": {"tp": 2, "etp": 1},
}
# On four.
LARGE: dict[str, dict[str, Any]] = {
    "ep2-tp2-sp": {"ep": 2, "tp": 2, "moe_dispatcher": "allgather"},
    "ep2-tp2-etp1-sp": {"ep": 2, "tp": 2, "etp": 1},
    "ep2-pp2": {"ep": 2, "pp": 2},
    "ep2-cp2": {"ep": 2, "cp": 2},
    "tp2-sp-pp2": {"tp": 2, "pp": 2},
    "tp2-sp-cp2": {"tp": 2, "cp": 2},
    "pp2-cp2": {"pp": 2, "cp": 2},
}
EXPERTS_ONLY = ("ep2", "etp2", "tp2-etp1-sp", "ep2-tp2-sp", "ep2-tp2-etp1-sp", "ep2-pp2", "ep2-cp2")
# Two cuts at once, or none: a few of the subjects, since each cut alone has all of them.
SAMPLED = ("masked-tied", "block-moe", "wedlm", "predicting")
# Every layout, and every objective once, on one or two of them, with the rows packed or not; megatron_worker.py adds
# cells and runs of other kinds. The others are left to test_megatron_layouts.py.
QUICK = {
    "dp2": ("masked-tied",),
    "tp2": ("block-tied",),
    "tp2-sp": ("block-moe-packed", "uniform-packed"),
    "pp2": ("shifted-packed", "complementary"),
    "pp2-vp2": ("shifted-moe", "uniform-tied"),
    "cp2": ("masked-packed", "idlm-packed"),
    "ep2": ("sinks-packed",),
    "etp2": ("block-moe-packed",),
    "tp2-etp1-sp": ("block-moe",),
    "ep2-tp2-sp": ("masked-moe",),
    "ep2-tp2-etp1-sp": ("block-moe-packed",),
    "ep2-pp2": (),  # with two micro-batches at a time
    "ep2-cp2": ("block-moe-packed",),
    "tp2-sp-pp2": ("block-moe",),
    "tp2-sp-cp2": ("wedlm-packed",),
    "pp2-cp2": ("masked-tied",),
}
WHOLE = ("tp2", "tp2-sp", "pp2", "pp2-vp2", "cp2", "ep2", "ep2-tp2-sp")

# What megatron-core cannot do, and what the engine says of it.
NO_TP_ALONE = "sequence_parallel"  # the field of the error


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


def cells(processes: int, quick: bool | None = None) -> list[Cell]:
    """Every cell on so many processes, a layout after the other: groups are made once for each. `quick`: those of
    `QUICK`, or only the others."""
    found = []
    for layout in LAYOUTS if processes == 2 else LARGE:
        for name, subject in SUBJECTS.items():
            if (subject.experts or layout not in EXPERTS_ONLY) and (layout in WHOLE or name in SAMPLED):
                found += [Cell(name, packed, layout) for packed in (False, True)]
    return [cell for cell in found if quick is None or quick == (cell.row in QUICK[cell.layout])]


def refusal(cell: Cell) -> str | None:
    """What the engine says where it cannot train a cell; None where it can."""
    if cell.layout == "tp2" and SUBJECTS[cell.subject].experts:
        return NO_TP_ALONE
    return None


STEPS = 12  # of an uninterrupted run

# A run of many steps on weights from nothing; the vocabulary of 125 is padded at tp 2.
RUN: dict[str, Any] = {
    "from_scratch": True,
    "steps": STEPS,
    "optimizer": "adamw",
    "lr": 1e-2,
    "clip_grad": 1.0,
    "weight_decay": 0.1,
    "length_variation": 0.2,
    "eval_interval": 5,
    "save_interval": 4,
    "norm_interval": 3,
}


class Files:
    """Paths below the folder that the tests and the processes share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def tokenizer(self) -> Path:
        """One for the texts that runs write."""
        return self.root / "tokenizer"

    @property
    def corpus(self) -> Path:
        """The prefix of a pair of token ids, documents of 3 to 20 tokens."""
        return self.root / "corpus"

    def hub(self, subject: str) -> Path:
        return self.root / "hub" / subject

    def run(self, name: str) -> Path:
        """The output folder of a run."""
        return self.root / "runs" / name

    def reference(self, row: str) -> Path:
        """What one process computes."""
        return self.root / f"reference_{row}.pt"

    def __getattr__(self, name: str) -> Path:
        """Inputs that do not fit: data (tiny, damaged, foreign, more) and models (one_head, three_layers, bare); and
        a model that predicts more than one token (predicting)."""
        if name not in ("tiny", "damaged", "foreign", "more", "one_head", "three_layers", "bare", "predicting"):
            raise AttributeError(name)
        return self.root / "inputs" / name

    def write(self) -> None:
        for name, subject in SUBJECTS.items():
            subject.build().write(self.hub(name))
        models()[PREDICTING].write(self.predicting)
        self.tokenizer.mkdir()
        write_tokenizer(self.tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast"})
        _write_pair(self.corpus, 60)
        _write_pair(self.more, 90)
        _write_pair(self.tiny, 1)
        _write_pair(self.foreign, 60, first=140)
        _write_pair(self.damaged, 60)
        index = Path(f"{self.damaged}.idx")
        index.write_bytes(index.read_bytes()[:-40])
        for folder, sizes in (
            (self.one_head, {"n_kv_heads": 1}),
            (self.three_layers, {"n_layers": 3}),
            (self.bare, {}),
        ):
            folder.mkdir()
            config = {**SUBJECTS["masked"].build().config, **sizes}
            (folder / "config.json").write_text(json.dumps(config))

    def write_some(self, *subjects: str) -> Files:
        """Of all that `write` does, only the models of some subjects and the corpus. Returns itself."""
        for name in subjects:
            SUBJECTS[name].build().write(self.hub(name))
        _write_pair(self.corpus, 60)
        return self

    def options(self, cell: Cell, **changes: Any) -> dict[str, Any]:
        """One step of plain gradient descent, so that what moved is the gradient."""
        subject = SUBJECTS[cell.subject]
        layout = (LAYOUTS | LARGE | {"one": {}})[cell.layout]
        return {
            "engine": "megatron",
            "model": str(self.hub(cell.subject)),
            "family": subject.build().family,
            "data": [str(self.corpus)],
            "output": str(self.root / "run"),
            "objective": subject.objective,
            "precision": "fp32",
            "steps": 1,
            "global_batch_size": SAMPLES,
            "micro_batch_size": 1,
            "seq_length": LENGTH,
            "length_variation": 0.5,
            "document_attention": cell.packed,
            "split": "90,10,0",
            "optimizer": "sgd",
            "lr": 16.0,
            "lr_schedule": "constant",
            "clip_grad": 0.0,
            "weight_decay": 0.0,
            **subject.options,
            **(subject.parallel if layout else {}),
            **layout,
            **changes,
        }

    def run_options(self, name: str, subject: str = "masked", layout: str = "one", **changes: Any) -> dict[str, Any]:
        """A run in a folder of its own."""
        return self.options(Cell(subject, False, layout), **{**RUN, "output": str(self.run(name)), **changes})


def _write_pair(prefix: Path, documents: int, first: int = 3) -> None:
    """Documents of 3 to 20 tokens."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(3, 20, documents)
    with IndexedWriter(prefix, token_dtype(TOKENS)) as writer:
        writer.add(generator.integers(first, first + TOKENS - 3, int(lengths.sum())), lengths.tolist())
