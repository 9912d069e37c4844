"""Each layout, and each command that runs on several processes, on two nodes: what one process gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dlm_bridge.train.metrics import read_rows
from tests.cli.conftest import llada  # noqa: F401
from tests.data.chats import chatty, conversation, write_rows
from tests.nodes.cases import LAYOUTS, assert_alike, pretrain, words
from tests.nodes.network import ADDRESSES, Network
from tests.parallel.megatron_cases import Files
from tests.processes import free_port


@pytest.fixture(scope="module")
def alone(nodes: Network, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run of one process."""
    output = tmp_path_factory.mktemp("alone") / "run"
    command = nodes.run(0, *pretrain(files, output), forked=True)
    assert command.code == 0, command.said()
    return output


@pytest.mark.short
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_on_two_nodes_gives_the_losses_of_one_process(
    network: Network, files: Files, alone: Path, tmp_path: Path, layout: str
) -> None:
    job = network.job(*pretrain(files, tmp_path / "run", **LAYOUTS[layout]))
    assert job.wait() == [0, 0], job.said()
    assert_alike(tmp_path / "run", alone)
    verified = network.run(1, "verify", tmp_path / "run", forked=True)
    assert verified.code == 0, verified.said()


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_torchrun_on_two_nodes(network: Network, files: Files, alone: Path, tmp_path: Path, rendezvous: str) -> None:
    """Two processes on each node: tensor parallel on each, data parallel across."""
    start = ["torchrun", "--nnodes", 2, "--nproc-per-node", 2]
    run = ["-m", "dlm_bridge.cli", *pretrain(files, tmp_path / "run", engine="megatron", tp=2)]
    port = free_port()
    ranks = []
    for node in range(2):
        if rendezvous == "c10d":
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{port}", "--rdzv-id", "run"]
        else:
            meet = ["--node-rank", node, "--master-addr", "node0", "--master-port", port]
        ranks.append(network.start(node, *start, *meet, *run))
    assert [rank.wait(240) for rank in ranks] == [0, 0], ranks[0].said() + ranks[1].said()
    assert_alike(tmp_path / "run", alone)


@pytest.mark.short
def test_sft(
    network: Network,
    seed_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    """Rank 0 packs the rows for all."""
    model = tmp_path / "model"
    chatty(tokenizer).save_pretrained(model)
    config = json.loads((seed_folder / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_sequence_length": 128}))
    chats = write_rows(tmp_path / "chats.jsonl", [conversation(number) for number in range(24)])
    options: dict[str, Any] = {
        "model": model,
        "data": chats,
        "from_scratch": True,
        "steps": 3,
        "seq_length": 96,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "save_interval": 0,
        "eval_interval": 0,
        "split": "100,0,0",
    }
    _compare(network, tmp_path, words("sft", **options))
    assert_alike(tmp_path / "two", tmp_path / "one")


@pytest.mark.short
def test_rl(network: Network, policy_folder: Path, problems: Path, reward: str, tmp_path: Path) -> None:
    """Each node samples its completions. The loss is a difference of nearly equal numbers."""
    options: dict[str, Any] = {
        "model": policy_folder,
        "data": problems,
        "method": "diffu-grpo",
        "reward": reward,
        "steps": 3,
        "global_batch_size": 16,
        "micro_batch_size": 8,
        "group_size": 8,
        "seq_length": 16,
        "gen_length": 4,
        "lr": 1e-2,
        "eval_interval": 0,
        "save_interval": 0,
    }
    _compare(network, tmp_path, words("rl", **options))
    found, wanted = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    assert len(found) == len(wanted) == 3
    for row, other in zip(found, wanted, strict=True):
        assert {name: row[name] for name in ("step", "reward", "tokens")} == {
            name: other[name] for name in ("step", "reward", "tokens")
        }
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(other[name], abs=1e-5)


@pytest.mark.short
def test_generate_and_eval(network: Network, llada: Path, tmp_path: Path) -> None:  # noqa: F811
    """The nodes share the rows."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "abc" * length}) + "\n" for length in (1, 5, 2, 1, 4)))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 2)
    sampled = words("generate", str(llada), jsonl=prompts, gen_length=12, seed=5, temperature=2, batch_size=2)
    _compare(network, tmp_path, sampled)
    assert (tmp_path / "two").read_text() == (tmp_path / "one").read_text()
    measured = words("eval", str(llada), perplexity=tmp_path / "text.txt", window=12, mc_samples=3, batch_size=4)
    one, two = (json.loads(said) for said in _compare(network, tmp_path, [*measured, "--json"], output=False))
    assert (one["settings"].pop("processes"), two["settings"].pop("processes")) == (1, 2)
    del one["date"], two["date"]
    assert two == one


def _compare(network: Network, root: Path, arguments: list[str], output: bool = True) -> list[str]:
    """Run a command on one node, then on both: what their first processes print after their logs, if it is JSON."""
    said = []
    for name in ("one", "two"):
        run = [*arguments, *(["--output", str(root / name)] if output else [])]
        if name == "one":
            command = network.run(0, *run, forked=True)
            assert command.code == 0, command.said()
        else:
            job = network.job(*run)
            assert job.wait() == [0, 0], job.said()
            command = job.ranks[0]
        said.append("{" + command.said().partition("{")[2])
    return said
