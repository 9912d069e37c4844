"""What a family contributes to the suite: its Hub config with tiny sizes, its tensors, and its maths."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge import Layout
from dlm_bridge.models.families import FamilySpec, family_by_name
from tests.checkpoints import write_hub_folder, write_tokenizer

Tensors = dict[str, torch.Tensor]
BuildTensors = Callable[[dict[str, Any], int, torch.dtype], Tensors]
# (tensors, config, input_ids [B, S], allowed [B, S, S] bool, positions [B, S]) -> logits [B, S, V] in float64
Reference = Callable[[Tensors, dict[str, Any], torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FamilyCase:
    """One tiny checkpoint of a family, and what it must compute.

    Give it at least 4 layers, 2 key/value heads and 100 tokens of vocabulary, so that every layout cuts something;
    with experts also 4 of them.
    """

    name: str  # the family's, as in `--family`
    config: dict[str, Any]  # the Hub's config.json key for key, with tiny sizes
    tensors: BuildTensors
    reference: Reference
    mask_token_id: int | None  # what the loaded configuration must say
    label: str = ""  # tells apart several cases of one family
    block: int | None = None  # the block size that the loaded configuration must have, where attention has blocks
    sizes_of_blocks: tuple[int, ...] = ()  # other values of `block_size` to try
    tokenizer: dict[str, Any] = field(default_factory=dict)  # tokenizer_config.json as on the Hub; {}: none published

    @property
    def spec(self) -> FamilySpec:
        return family_by_name(self.name)

    @property
    def id(self) -> str:
        return f"{self.name}-{self.label}" if self.label else self.name

    @property
    def length(self) -> int:
        """A sequence length with whole blocks and a part of one."""
        return 24 if self.block is None else max(24, 2 * self.block + self.block // 2)

    def write(self, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Path:
        """The checkpoint in the Hub's layout: two shards with an index, remote code that must never run, a card."""
        config = {**self.config, **overrides}
        for key in ("torch_dtype", "dtype"):
            if key in config:
                config[key] = str(dtype).removeprefix("torch.")
        write_hub_folder(folder, config, self.tensors(config, seed, dtype))
        if self.tokenizer:
            write_tokenizer(folder, self.tokenizer)
        return folder

    def load(self, folder: Path, **kwargs: Any) -> Any:
        """As a user would: through the first Auto class, or by the family's class where a config cannot tell."""
        import transformers

        names = self.spec.auto_classes
        loader = getattr(transformers, names[-1]) if names else self.spec.load("model_class")
        return loader.from_pretrained(folder, **kwargs).eval()

    @property
    def family_argument(self) -> str | None:
        """What `--family` must be: the name where config.json cannot tell."""
        return None if self.spec.auto_classes else self.name

    def allowed(self, positions: torch.Tensor, real: torch.Tensor, block: int | None = None) -> torch.Tensor:
        """[B, S, S] bool by the definition of the attention pattern: query q (row) attends to key k (column)."""
        q, k = positions[:, :, None], positions[:, None, :]
        block = block or self.block
        if self.spec.attention_pattern == "bidirectional":
            allowed = (q == q) & (k == k)
        elif self.spec.attention_pattern == "causal":
            allowed = k <= q
        else:
            assert block is not None, f"{self.id}: say its block size"
            allowed = k // block <= q // block
        return allowed & real[:, None, :]


# Cases that `make test` cuts over two processes: each attention pattern, a body of our own, biases, shifted logits,
# norms of queries and keys, experts.
CUT = ("dream", "idlm", "llada", "llada2_moe", "sdar")


# Cases of a family of which another one shows the same.
VARIANTS = (
    "difflm-tied", "fast_dllm_v2-tied", "illada-untied", "llada-tied", "llada2_moe-2.2",
    "nemotron_labs_diffusion-beyond-context", "sdar-trado", "wedlm-qwen2",
)  # fmt: skip


def few(*endings: str) -> list[str]:
    """Ids of the cases of one family per body and attention pattern, each with these endings."""
    names = ("dream", "fast_dllm_v2", "idlm", "llada", "llada2_moe", "nemotron_labs_diffusion", "sdar", "wedlm")
    return [f"{name}{ending}" for name in names for ending in endings or ("",)]


def all_cases() -> list[FamilyCase]:
    """`CASE` or `CASES` of every family file beside this one."""
    package = importlib.import_module("tests.families")
    cases: list[FamilyCase] = []
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("test_") and module.name not in ("case", "conftest", "tp_worker"):
            loaded = importlib.import_module(f"tests.families.{module.name}")
            cases += getattr(loaded, "CASES", None) or [loaded.CASE]
    return cases


def some_slow(cases: Iterable[FamilyCase], *slow: str) -> list[Any]:
    """Parameters of a test: those cases that show nothing more than others do are left to `make test-slow`."""
    return [pytest.param(case, id=case.id, marks=[pytest.mark.slow] * (case.id in slow)) for case in cases]


def layouts(family: FamilySpec, config: dict[str, Any], every: bool) -> list[Layout]:
    """Of a conversion: interleaved and uneven stages, cut by rows as well; of experts, over ranks. `every`: also those
    of which another has all cuts."""
    dense = [Layout(tp=2, pp=2, vp=2), Layout(pp=2, first_stage=1)]
    experts = family.mapping.dims(config).experts > 0
    found = [Layout(tp=2, pp=2, ep=2, etp=1), Layout(tp=2, ep=4, etp=2)] if experts else dense
    if every:
        found += [Layout(), Layout(tp=2, pp=2), *([*dense, Layout(ep=2)] if experts else [])]
    return found


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
