"""What the interop tests are about: tiny models, layouts, one batch of tokens, and where the files lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dlm_bridge import Layout

# Grouped queries, a vocabulary that tp 2 does not divide, a tied output layer: each wrong row order or count shows.
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {"n_kv_heads": 2},
    "odd_vocabulary": {"vocab_size": 125, "embedding_size": 125, "mask_token_id": 124},
    "tied": {"n_kv_heads": 2, "weight_tying": True, "vocab_size": 125, "embedding_size": 125, "mask_token_id": 124},
}

LAYOUTS: dict[str, Layout] = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "pp2_uneven": Layout(pp=2, first_stage=1),
    "pp2_string": Layout(pp=2, pipeline="E|ttttL"),  # the embedding has a stage of its own
    "pp2_vp2": Layout(pp=2, vp=2),
    "dp2": Layout(),
}

# The layout under which a checkpoint is imported is never the one under which megatron-core loads it.
IMPORTED: dict[str, Layout] = {"tp2": Layout(tp=1, pp=4), "pp2": Layout(tp=2, pp=1), "pp2_vp2": Layout(tp=2, pp=2)}

# What megatron-core itself saves and `export` then reads: padded at tp 2, tied over two stages at pp 2.
SAVED = (("gqa", "tp2"), ("gqa", "pp2"), ("odd_vocabulary", "tp2"), ("tied", "tp2"), ("tied", "pp2"))

BATCH, LENGTH = 2, 12

OK = "ok"  # what a check says in the report when nothing was raised


def plan() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every check that two processes run, in order: its name, the function of `checks` and that one's arguments."""
    checks: dict[str, tuple[str, dict[str, Any]]] = {
        "platform": ("platform_is_reversible_and_refuses_other_versions", {}),
        "one_process": ("one_process_without_torchrun", {}),
        "bad_input": ("bad_input_is_named", {}),
        "half_precision": ("half_precision_is_kept", {}),
        "mixed_dtypes": ("mixed_dtypes_need_a_choice", {}),
        "more_padding": ("more_padding_is_trimmed_by_role", {}),
        "wrapped": ("wrapped_models_are_unwrapped", {}),
        "reads": ("each_stage_reads_its_own_tensors", {}),
        "optimizer_attributes": ("parameters_are_ready_for_the_optimizer", {}),
        "logits[gqa-tp2-sp]": ("built_logits_match", {"model": "gqa", "layout": "tp2", "sequence_parallel": True}),
        "gradients[gqa-tp2-sp]": ("gradients_match", {"model": "gqa", "layout": "tp2", "sequence_parallel": True}),
    }
    for layout in LAYOUTS:
        for model in MODELS:
            case = {"model": model, "layout": layout}
            checks[f"logits[{model}-{layout}]"] = ("built_logits_match", case)
            checks[f"stream[{model}-{layout}]"] = ("streamed_weights_are_the_source", case)
    for layout in ("tp2", "pp2", "pp2_vp2"):
        checks[f"gradients[gqa-{layout}]"] = ("gradients_match", {"model": "gqa", "layout": layout})
        checks[f"bidirectional[{layout}]"] = ("last_token_moves_first_logit", {"layout": layout})
    for model, layout in SAVED:
        case = {"model": model, "layout": layout}
        checks[f"save[{model}-{layout}]"] = ("megatron_saves", case)
        checks[f"refresh[{model}-{layout}]"] = ("changed_weights_refresh_the_hub_model", case)
    for layout in IMPORTED:
        for model in MODELS:
            case = {"model": model, "layout": layout}
            checks[f"load[{model}-{layout}]"] = ("imported_checkpoint_loads_strictly", case)
    return checks


def tokens(vocab: int) -> torch.Tensor:
    """input_ids [B, S]."""
    return torch.randint(0, vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


def logit_weights(vocab: int) -> torch.Tensor:
    """[B, S, V]; sum(logits * weights) is the loss whose gradients are compared."""
    return torch.randn(BATCH, LENGTH, vocab, generator=torch.Generator().manual_seed(6))


class Files:
    """Paths below the folder that the tests and the two processes share."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def hub(self, model: str) -> Path:
        return self.root / "hub" / model

    def imported(self, model: str, layout: str) -> Path:
        return self.root / "imported" / f"{model}_{layout}"

    def saved(self, model: str, layout: str) -> Path:
        """What megatron-core saved."""
        return self.root / "saved" / f"{model}_{layout}"

    def reference(self, model: str) -> Path:
        """The Hub-side model's logits and gradients."""
        return self.root / f"reference_{model}.pt"

    def report(self, rank: int) -> Path:
        return self.root / f"report_{rank}.json"
