"""What four processes compute with a live model: tiny checkpoints, layouts, and one global batch for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dlm_bridge import Layout
from dlm_bridge.objectives.base import divisors
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.single_stream import MaskedDiffusion
from tests.interop.cases import models

WORLD, SAMPLES, ROWS, TERMS = 4, 8, 2, 2  # processes; samples a global batch; rows a micro-batch; sums of the loss

TP2_SP = {"sequence_parallel": True}
DEALLOCATE = {"deallocate_pipeline_outputs": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}


@dataclass(frozen=True)
class Case:
    """A model in a layout; ranks that are left over are data parallel."""

    model: str
    layout: Layout
    overrides: dict[str, Any] = field(default_factory=dict)
    accumulates: bool = False  # the output layer's gradient goes straight into `main_grad`


# The vocabulary of 125 is padded at tp 2; the tied one is held by the first and the last stage.
CASES = {
    "dp4": Case("odd_vocabulary", Layout()),
    "tp2": Case("odd_vocabulary", Layout(tp=2)),
    "tp2-sp": Case("odd_vocabulary", Layout(tp=2), TP2_SP),
    "pp2": Case("odd_vocabulary", Layout(pp=2)),
    "pp2-vp2": Case("odd_vocabulary", Layout(pp=2, vp=2), DEALLOCATE),
    "tp2-sp-pp2": Case("odd_vocabulary", Layout(tp=2, pp=2), TP2_SP, accumulates=True),
    "tied-tp2": Case("tied", Layout(tp=2), accumulates=True),
    "tied-tp2-sp": Case("tied", Layout(tp=2), TP2_SP),
    "tied-pp2": Case("tied", Layout(pp=2), DEALLOCATE, accumulates=True),
    "tied-pp2-vp2": Case("tied", Layout(pp=2, vp=2)),
    "moe-ep2": Case("llada_moe", Layout(ep=2)),
    "moe-ep2-alltoall": Case("llada_moe", Layout(ep=2), ALL_TO_ALL, accumulates=True),
    "moe-ep2-tp2-sp": Case("llada_moe", Layout(tp=2, ep=2)),
    "moe-ep2-tp2-etp1-sp": Case("llada_moe", Layout(tp=2, ep=2, etp=1), ALL_TO_ALL),
    "shared-experts-ep2-pp2": Case("llada2_moe", Layout(ep=2, pp=2)),
    # gloo cannot gather what the all-to-all dispatcher leaves on the ranks that share an expert.
    "shared-experts-ep2-tp2-sp": Case("llada2_moe", Layout(tp=2, ep=2)),
    # Blocks of 32 of which a tensor parallel rank has a part.
    "block-routed-ep2-tp2-sp": Case("llada2_moe-2.2", Layout(tp=2, ep=2)),
    "block-routed-pp2": Case("llada2_moe-2.2", Layout(pp=2), RECOMPUTE),
}


def noisy_batch(model: str, samples: range) -> NoisyBatch:
    """Rows of the global batch in two terms, their weights divided by the global normaliser; rows 2 and 3 have no
    position with a loss."""
    case = models()[model]
    ids = torch.randint(0, case.vocab - 1, (SAMPLES, case.length), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[2:4] = IGNORE_INDEX
    objective = MaskedDiffusion(mask_token_id=case.vocab - 1)
    whole = objective.noise(ids, Uniforms.keyed(0, 1, range(SAMPLES), case.length), labels)
    normaliser = divisors(torch.stack([whole.normaliser[0], whole.normaliser[0] / 3]))
    mine = slice(samples.start, samples.stop)
    noisy = objective.noise(ids[mine], Uniforms.keyed(0, 1, samples, case.length), labels[mine])
    terms = noisy.targets % TERMS
    fields = {**vars(noisy), "terms": terms, "weights": noisy.weights / normaliser[terms], "normaliser": normaliser}
    return NoisyBatch(**fields)


class Files:
    """Paths below the folder that the tests and the processes share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def hub(self, model: str) -> Path:
        return self.root / "hub" / model

    def reference(self, model: str) -> Path:
        """The sums of the loss and the gradients by transformers' model."""
        return self.root / f"reference_{model}.pt"
