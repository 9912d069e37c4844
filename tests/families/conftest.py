"""One checkpoint and one loaded model per case, made once."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.generation.kv_cache import CacheMode
from tests.checkpoints import write_tokenizer
from tests.families.case import CUT, FamilyCase, all_cases
from tests.families.tp_worker import sampled
from tests.processes import launch


@pytest.fixture(scope="session", params=all_cases(), ids=lambda case: case.id)
def case(request: pytest.FixtureRequest) -> FamilyCase:
    return request.param


@pytest.fixture(scope="session")
def folder(case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The case's checkpoint, fp32. Do not write to it."""
    return case.write(tmp_path_factory.mktemp("families") / case.id)


@pytest.fixture(scope="session")
def model(case: FamilyCase, folder: Path) -> Any:
    """The loaded checkpoint. Do not change it."""
    return case.load(folder)


@pytest.fixture(scope="session")
def ids(case: FamilyCase) -> torch.Tensor:
    """[3, S] token ids."""
    return torch.randint(0, 100, (3, case.length), generator=torch.Generator().manual_seed(1))


def every_cache(model: Any, input_ids: torch.Tensor) -> dict[str | None, torch.Tensor]:
    """The tokens by what is cached between forward passes, as far as the sampler allows; None is its default."""
    tokens: dict[str | None, torch.Tensor] = {}
    for cache in (None, *get_args(CacheMode)):
        with suppress(DlmBridgeError):
            tokens[cache] = sampled(model, input_ids, cache)
    assert len(tokens) > 2
    return tokens


@pytest.fixture(scope="session")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of two processes said of each case of `CUT`: "ok" or a traceback. They run once, for all of them."""
    return _in_two_processes(tmp_path_factory.mktemp("tensor_parallel"), [one for one in all_cases() if one.id in CUT])


@pytest.fixture(scope="session")
def other_tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of the other cases."""
    others = [one for one in all_cases() if one.id not in CUT]
    return _in_two_processes(tmp_path_factory.mktemp("other_tensor_parallel"), others)


def _in_two_processes(root: Path, cases: list[FamilyCase]) -> dict[str, list[str]]:
    patterns: set[str] = set()
    for case in cases:
        first = (
            case.spec.attention_pattern not in patterns
        )  # with every cache, and drawn; the others with their default
        patterns.add(case.spec.attention_pattern)
        input_ids = torch.randint(0, 100, (2, case.length), generator=torch.Generator().manual_seed(1))
        model = case.load(case.write(root / case.id))
        with torch.no_grad():
            logits = model(input_ids).logits
        tokens = every_cache(model, input_ids) if first else {None: sampled(model, input_ids)}
        saved = {"input_ids": input_ids, "logits": logits, "sampled": tokens, "first": first}
        torch.save(saved, root / f"{case.id}.pt")
    llada = root / "llada"
    if llada.is_dir():  # for the command
        write_tokenizer(llada, {"tokenizer_class": "PreTrainedTokenizerFast"})
        Bridge.from_hf(llada).to_megatron(root / "megatron", Layout(pp=2))
    return launch("tests.families.tp_worker", root, timeout_s=500)
