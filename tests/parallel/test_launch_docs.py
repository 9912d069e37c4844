"""docs/launch.md, docs/support_matrix.md and configs/README.md: their flags exist, their scripts parse; the table of
layouts is what the tests of the engine run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from dlm_bridge.settings import options_of
from dlm_bridge.train.config import RLConfig
from tests.parallel.megatron_cases import LARGE, LAYOUTS, SUBJECTS, cells, refusal
from tests.parallel.megatron_lora_worker import CHANGES as ADAPTERS
from tests.parallel.megatron_lora_worker import DORA

pytest.importorskip("megatron.core")

from tests.rl.megatron_worker import MODELS, PARTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/launch.md", ROOT / "docs/support_matrix.md", ROOT / "configs/README.md"]
OPTIONS = {option.flag for option in options_of(RLConfig).values()}
# Of this command, of preprocess, of the benchmarks and of the launchers.
OTHERS = {
    *("--resume", "--config", "--dry-run", "--gpus", "--from-scratch", "--append-eod", "--smoke"),
    *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--shutdown-timeout"),
    *("--nodes", "--ntasks-per-node", "--gpus-per-node", "--signal"),
    *("--requeue", "--gpus-per-task", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
    *("--cluster", "--json", "--prefix", "--cpu"),  # of env, torchfrtrace and accelerate launch
    *("--build-arg", "--tag"),  # of docker
    *("--device-map", "--jsonl", "--overwrite", "--processes", "--prompt", "--tp-plan"),  # of other commands
    *("--kill-on-bad-exit", "--ntasks"),  # of srun
}
COLUMNS = {
    "masked": ("masked", "masked_fraction"),
    "shifted": ("shifted", "shifted_cart"),
    "block": ("block", "block_levels"),
    "complementary": ("block_complementary",),
    "wedlm": ("wedlm",),
    "idlm": ("idlm",),
    "uniform": ("uniform", "uniform_hybrid"),
    "hybrid": ("nemotron",),
    "causal": ("causal",),
}
EVALUATED = {"dp2": "dense", "tp2": "dense"}  # by eval and generate --jsonl


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def last_cells(table: re.Match[str]) -> str:
    return "".join(line.split("|")[-2] for line in table[0].splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    text = re.sub(
        r"(?m)^\| the script \|.*\n(\|.*\n)*", last_cells, page.read_text()
    )  # its flags are another program's
    found = set(re.findall(r"(?<![\w-])(--[a-z][\w-]*)", text))
    unknown = {name for name in found - OTHERS - OPTIONS if name.replace("--no-", "--") not in OPTIONS}
    assert unknown == set()
    assert found


def test_scripts_parse() -> None:
    scripts = blocks(PAGES[0], "bash")
    assert len(scripts) == 7
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        for config in re.findall(r"--config (\S+)", script):
            assert (ROOT / config).is_file()


def test_the_table_is_what_the_tests_run() -> None:
    """Each layout's line says for each objective, for reinforcement learning and for adapters whether models without
    and with experts are trained in it."""
    trained: dict[str, dict[str, set[str]]] = {}
    for cell in cells(2) + cells(4):
        subject = SUBJECTS[cell.subject]
        if refusal(cell) is None:
            column = next(name for name, kinds in COLUMNS.items() if subject.objective in kinds)
            kind = "experts" if subject.experts else "dense"
            trained.setdefault(cell.layout, {}).setdefault(column, set()).add(kind)
    for layouts in (layouts for part in PARTS.values() for layouts in part.values()):
        for layout, subjects in layouts.items():
            kinds = {"experts" if MODELS.get(subject) == "experts" else "dense" for subject in subjects}
            trained.setdefault(layout.partition(",")[0], {}).setdefault("rl", set()).update(kinds)
    for changes in (ADAPTERS, DORA):
        for subject, *layouts in (run for runs in changes.stopped.values() for run in runs):
            kind = "experts" if SUBJECTS[subject].experts else "dense"
            for layout in layouts:
                trained.setdefault(layout, {}).setdefault("LoRA", set()).add(kind)
    wanted = {
        layout: [
            *(" + ".join(sorted(trained[layout].get(column, ()))) for column in (*COLUMNS, "rl", "LoRA")),
            "",  # FSDP's build
            EVALUATED.get(layout, ""),
        ]
        for layout in [*LAYOUTS, *LARGE]
    }
    written = "\n".join("| " + " | ".join([f"`{layout}`", *line]) + " |" for layout, line in wanted.items())
    shown = re.sub(r" +", " ", (ROOT / "docs/support_matrix.md").read_text())
    assert re.sub(r" +", " ", written) in shown, f"the table should be\n{written}"
