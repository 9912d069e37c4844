"""Every recipe loads, passes its dry run on the GPUs that it names, fits them, and gives way to the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm_bridge.plan.dry_run import DryRun, dry_run
from dlm_bridge.train.config.files import load_config
from dlm_bridge.train.schedule import learning_rate
from tests.data.chats import conversation, write_rows

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("*/*.yaml"))
MEMORY = 80e9


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed_folder: Path) -> dict[str, str]:
    """What a recipe leaves open."""
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    chats = write_rows(tmp_path / "chats.jsonl", [conversation(0)])
    return {"chats": str(chats), "output": str(tmp_path / "run"), "tokenizer": str(seed_folder)}


def show(recipe: Path, prepared: dict[str, str], **changes: object) -> DryRun:
    task = recipe.stem
    flags: dict[str, object] = {"output": prepared["output"], "data": ["mock"]}
    if task == "sft":  # of a model that is given
        flags |= {"data": [prepared["chats"]], "tokenizer": prepared["tokenizer"]}
        flags |= {"model": str(recipe.parent), "from_scratch": True}
    gpus = int(recipe.read_text().splitlines()[0].removeprefix("# GPUs: "))
    return dry_run(load_config(flags | changes, recipe, task=task), gpus)


@pytest.mark.parametrize("recipe", RECIPES, ids=[f"{path.parent.name}-{path.stem}" for path in RECIPES])
def test_passes_its_dry_run_and_fits(recipe: Path, prepared: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The models' own tokenizers are not here.
    monkeypatch.setattr("dlm_bridge.plan.dry_run.check_tokenizer", lambda *_: None)
    found = show(recipe, prepared)
    assert found.memory is not None
    assert found.memory.peak.total < MEMORY
    assert found.config.task == recipe.stem
    assert found.micro_batches * found.micro_batch_size * found.groups[2].size == found.config.data.global_batch_size


def test_there_is_a_recipe_of_every_kind() -> None:
    assert {path.parent.name for path in RECIPES} == {
        "a2d-1.7b",
        "llada-8b",
        "llada-moe-7b-a1b",
        "llada2-mini-16b-a1.4b",
        "megadlms-1.7b",
        "sdar-30b-a3b",
    }
    listed = (CONFIGS / "README.md").read_text()
    assert all(f"`{path.parent.name}/{path.name}`" in listed for path in RECIPES)


def test_a_published_recipe_has_its_rates(prepared: dict[str, str]) -> None:
    """MegaDLMs' examples/dlm_training/dlm_pretrain_1.7b.sh: 2e-4, down to 2e-5 in the last 1,000 steps."""
    config = show(CONFIGS / "megadlms-1.7b/pretrain.yaml", prepared).config
    steps = config.schedule.steps
    assert steps == 10_000_000_000 * 1000 // (256 * 2048)
    assert config.logging.eval_batches == 150_000_000 // (256 * 2048)
    assert learning_rate(config, 2000) == learning_rate(config, steps - 1000) == 2e-4
    assert learning_rate(config, steps) == pytest.approx(2e-5)


def test_the_command_line_wins(prepared: dict[str, str]) -> None:
    found = show(CONFIGS / "llada-8b/pretrain.yaml", prepared, tp=4, lr=1e-3)
    assert (found.config.parallel.tp, found.config.optimizer.lr, found.config.precision.precision) == (4, 1e-3, "bf16")
