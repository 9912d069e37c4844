"""Reinforcement learning in the Megatron engine is that of one process of the Accelerate engine, in every layout."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.errors import SettingError
from dlm_bridge.train.lora import EXPERTS as EXPERT_STACKS
from tests import launcher
from tests.families.llada_moe import CASE as EXPERTS
from tests.families.sdar import CASES as BLOCKS
from tests.processes import assert_ok, environments, forked
from tests.rl.conftest import SPECIAL, Run, letters, write_llada, write_llama

pytest.importorskip("megatron.core")

from tests.parallel.test_megatron_lora import write_adapter
from tests.refusals import refused
from tests.rl.megatron_worker import PARTS, names


def write_inputs(root: Path) -> Path:
    write_llada(root / "policy", layers=4, heads=4)
    write_llada(root / "tied", layers=2, tied=True)
    write_llama(root / "causal", layers=4, heads=4)
    for case, folder in ((BLOCKS[0], root / "blocks"), (EXPERTS, root / "experts")):
        case.write(folder, **SPECIAL)
        letters().save_pretrained(folder)
    attention = ["q_proj", "v_proj"]
    write_adapter(root / "lora", root / "policy", [*attention, "ff_proj", "ff_out"])
    write_adapter(root / "dora", root / "policy", [*attention, "attn_out"], dora=True)
    write_adapter(root / "expert-lora", root / "experts", ["q_proj", EXPERT_STACKS])
    prompts = ["ab", "b", "ccd", "da", "ac", "hg", "fe"]
    (root / "problems.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "wanted": "aceg"}) + "\n" for prompt in prompts)
    )
    pairs = [{"prompt": f"a{letter}", "chosen": "cc", "rejected": letter} for letter in "bcdefgh"]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (root / "wanted.py").write_text(
        "def share(prompts, completions, rows):\n"
        "    return [sum(map(text.count, row['wanted'])) / 4 for text, row in zip(completions, rows)]\n"
    )
    return root


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the checks of a part have run; the reports say what failed."""

    @functools.cache
    def run_part(part: str) -> Path:
        root = write_inputs(tmp_path_factory.mktemp("rl_megatron"))
        launcher.run("tests.rl.megatron_worker", [str(root), part], environments(1), [root / "log.txt"], 2000)
        return root

    return run_part


@pytest.mark.parametrize("name", names(2, "quick"))
def test_an_update_is_that_of_one_process(name: str, reports: Callable[[str], Path]) -> None:
    assert_ok(name, forked(reports("quick") / "reports-2", 2))


@pytest.mark.slow
@pytest.mark.timeout(2100)
@pytest.mark.parametrize(
    ("part", "processes", "name"),
    [
        (part, number, name)
        for part in PARTS
        if part != "quick"
        for number in (1, 2, 4)
        for name in names(number, part)
    ],
)
def test_every_layout(part: str, processes: int, name: str, reports: Callable[[str], Path]) -> None:
    assert_ok(name, forked(reports(part) / f"reports-{processes}", processes), processes)


@pytest.mark.parametrize(
    ("changes", "field", "named"),
    [
        ({"megatron": ["transformer.hidden_dropout=0.1"]}, "megatron", "transformer.hidden_dropout"),
        ({"fsdp": "optim"}, "fsdp", "rl"),
        ({"async_save": True}, "async_save", "rl"),
        ({"sharding": "fsdp"}, "sharding", "accelerate"),
    ],
)
def test_what_is_refused_is_named(run: Run, tmp_path: Path, changes: dict[str, Any], field: str, named: str) -> None:
    with refused(SettingError, field, named):
        run(tmp_path / "run", engine="megatron", **changes)
