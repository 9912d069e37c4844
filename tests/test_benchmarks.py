"""Every side of every benchmark runs, on tiny shapes and a CPU; and those of several processes end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests import launcher
from tests.checkpoints import write_tokenizer
from tests.processes import environments

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

from launching import launch  # noqa: E402

NEEDS_MEGATRON = (
    "train.py", "rl.py", "preprocess.py", "support_matrix.py", "layouts/one_step.py", "layouts/runs.py"
)  # fmt: skip
MEGATRON = importlib.util.find_spec("megatron") is not None
SCRIPT = """
import os, sys, time
from launching import end_after

def waits_for_another():
    time.sleep(600)

end_after(float(sys.argv[2]))
if sys.argv[1] == "raises" and os.environ["RANK"] == "1":
    raise MemoryError("out of memory")
if sys.argv[1] != "ends":
    waits_for_another()
"""


@pytest.mark.parametrize("how", ["ends", "raises", "waits"])
@pytest.mark.fast("raises", "waits")
def test_a_launch_ends_and_says_why(how: str, tmp_path: Path) -> None:
    script, watched = tmp_path / "script.py", []
    script.write_text(SCRIPT)
    # Starting takes a while on a machine that is busy.
    limit = 2 if how == "waits" else 200
    path = {"PYTHONPATH": f"{BENCHMARKS}:{Path(BENCHMARKS).parent}"}
    found = launch(
        str(script), 2, [how, str(limit)], 60 if how == "waits" else limit, tmp_path / "log", path,
        lambda: watched.append(time.monotonic()),
    )  # fmt: skip
    assert watched
    if how == "ends":
        assert found is None
    elif how == "raises":
        assert found is not None
        assert "MemoryError: out of memory" in found
    else:
        assert found is not None
        assert "waits_for_another (script.py:6)" in found


@dataclass(frozen=True)
class Case:
    """A benchmark's command on tiny shapes.

    Args:
        words: arguments, with {out} for a folder of the test's own.
        printed: regular expressions of which each side's line has one, with its figures.
        cuda: the script takes its device for a GPU, and gets a CPU in its place.
    """

    script: str
    words: str
    printed: tuple[str, ...]
    cuda: bool = False
    processes: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    code: int = 0


NUMBER = r"[\d.,]+"
TRAIN = "--seq-length 16 --micro-batch-size 2 --steps 2 --warmup 1 --only without --only ours --only peer"
TRAINED = tuple(rf'^{side} {{"tokens_per_s": {NUMBER}.*"loss": {NUMBER}}}' for side in ("WITHOUT", "OURS", "PEER"))
ACCELERATED = "--model tiny --seq-length 16 --batch 2 --eager-batch 2 --compiled-batch 2 --steps 2 --warmup 1"
RL_ROWS = ("dp", "fsdp", "fsdp-tp", "megatron-dp", "megatron-tp", "megatron-tp-tp")
CERTAINTY_RUNS = ("base", "plain", "own", "certain", "again", "trajectory", "complement", "both")
ADAPTATION_FORMS = (
    "twin", "bidirectional", "shifted", "block-causal-4", "block-causal-growing", "block-causal-shifted-4",
    "several-blocks-4", "idlm-4", "nemotron-8",
)  # fmt: skip
BRIDGE_FAMILIES = ("LLaDA-1.5", "Nemotron-Labs-Diffusion", "Qwen3", "Qwen3-MoE")
FAST = (
    Case("train.py", f"--model tiny {TRAIN}", (*TRAINED, '"ratio": .*"gain": '), cuda=True),
    Case(
        "train_accelerate.py", f"{ACCELERATED} --sides ours eager",
        tuple(rf'^{side}: {{"batch": 2, "tokens_per_s": {NUMBER}' for side in ("ours", "eager")),
    ),
    Case(
        "generate.py", "--case plain --size tiny --length 16 --block 8 --repeats 1 --executions eager",
        (rf'"forwards": 16, "ours_s": {NUMBER}, "published loop_s": {NUMBER}',),
    ),
    Case(
        "generate.py", "--case sdar --size tiny --length 8 --repeats 1 --executions eager",
        (rf'"ours_s": {NUMBER}, "roofline_s": {NUMBER}',),
    ),
    Case(
        "quantized.py",
        "--size quantized-tiny --length 8 --block 8 --steps-per-block 2 --repeats 1 --execution eager --folder {out}",
        tuple(rf'"weights": "{name}".*"kl": {NUMBER}' for name in ("bf16", "fp8", "int8", "int4")),
    ),
    Case(
        "attention.py", "--tiny", (r"^tiny .*relative error \de-0[2-9]", r"^tiny, two padded .*error \de-0[2-9]"),
        cuda=True, environment={"TRITON_INTERPRET": "1"},
    ),
    Case(
        "structured.py",
        "{out}/schemas --tokenizer {out} --sample 3 --walks 2 --tokens 20 --texts --lengths D D+1 --rows {out}/rows",
        (r"^b/two.json: refused: .*#/contains", r"^schemas 3, accepted 2 \(66.7%\), with an invalid text 0",
         rf"^CPU seconds: median {NUMBER}", r"^ +1 this keyword", r"^\| idlm \| D 2 of 2 \| D\+1 2 of 2 \|$"),
    ),
)  # fmt: skip
SLOW = (
    Case("train.py", f"--model tiny-moe {TRAIN}", (*TRAINED, '"ratio": .*"gain": '), cuda=True),
    Case(
        "train_accelerate.py", f"{ACCELERATED} --sides compiled --precision fp32",
        (rf'^compiled: {{"batch": 2, "tokens_per_s": {NUMBER}',),
    ),
    Case("attention.py", "--tiny --tune", (r"for a group: 1: ",), True, environment={"TRITON_INTERPRET": "1"}),
    Case(
        "steps.py", "--device cpu --rows 2 --layers 1 --hidden 32 --new-tokens 16 --where",
        (r"^llada .*cache=dual.*steps of \d+ operators", r"^dreamon", r"^wedlm", r"^idlm", r"^nemotron.* operators"),
    ),
    Case(
        "engine_throughput.py",
        "--output {out} --size sdar-tiny --rows 2 --prompt-tokens 6 --long-prompt 20 --new-tokens 8 --only ours",
        tuple(
            rf'^{{"way": "ours", .*"rows": 2, "prompt_tokens": {size}, .*"tokens_per_s": {NUMBER}, "first_token_ms": '
            for size in (6, 20)
        ),
    ),
    Case(
        "structured_overhead.py", "--device cpu --tiny --states 10 --rows 1 2 --new-tokens 32",
        (rf'^{{"rows": 2, "temperature": 1.0, "states": 10, "step_ms": {NUMBER}, "overhead_ms": ',),
    ),
    Case(
        "conversion.py", "--gb 0.02 --repeat 1 --folder {out} --peers {out}",
        (r"^cp -r", r"^import ", r"^export ", r"^reshard ", r"^mbridge: "),
    ),
    Case(
        "bridge_exchange.py", "--tiny --folder {out}",
        tuple(rf'"{family}".*"import".*"ours_s": {NUMBER}.*: "\d+ tensors equal"' for family in BRIDGE_FAMILIES),
    ),
    Case(
        "preprocess.py", "--megabytes 0.3 --rounds 1 --workers 2",
        (rf"Megatron-LM's way +2 workers +{NUMBER} tokens/s", rf"dlm-bridge +2 workers +{NUMBER} tokens/s"),
    ),
    Case(
        "rl.py", "--size tiny --gpus 2 --steps 1 --completions 16 --prompt 8 --limit 400 --folder {out}",
        tuple(rf'^{{"row": "{row}".*"step_s": {NUMBER}' for row in RL_ROWS),
    ),
    Case(
        "generate_gpus.py",
        "--size tiny --gpus 2 --length 8 --rows 2 --families llada sdar llada2_moe --limit 400 --folder {out}",
        (r'"execution": "eager".*"ms_per_forward": ', r"^device map of 1: llada: .*equal tokens: 100%"),
    ),
    Case(
        "fine_tuning.py", "--model tiny --processes 2 --precision fp32 --output {out}/runs",
        (r"13 equal, 0 off, 0 failed, 0 not run",),
    ),
    Case(
        "certainty.py",
        "--output {out}/runs --size tiny --digits 1 --examples 400 --rows 4 --batch 16 --steps 600 --more 2 --last 2 "
        "--recorded 200",
        tuple(rf'^{{"model": "{run}", "threshold": 0.9, "right": ' for run in CERTAINTY_RUNS),
    ),
    Case(
        "adaptation_forms.py",
        "--model {out}/model --data {out}/data --output {out}/forms --jobs 1 --lrs 1e-3 --epochs 1 1 1 --keep 2 "
        "--finalists 1 --infilling-epochs 1 --batch 4 --problems 4 --new-tokens 32 --forms "
        + " ".join(ADAPTATION_FORMS),
        (
            *(rf'^{{"part": "{form}_0.001_1", .*"tokens_per_pass": {NUMBER}' for form in ADAPTATION_FORMS),
            r'^{"part": "twin_0.001_1_test", .*"problems": "test".*"of": 5, ', r'^{"form": .*"ratio_to_twin": ',
            r'^{"part": "infilling_bidirectional".*"exact": ', r'^{"part": "infilling_twin".*"exact": ', "^done",
        ),
    ),
    Case(
        "fsdp_building.py", "--worker --model {out} --strategies fsdp2 --seq-length 16 --limit 400",
        (r"^fsdp2: building ", r"^fsdp2: step 2: loss ", r"^fsdp2: steps "), cuda=True, processes=2,
    ),
    Case(
        "layouts/one_step.py", "--output {out}/cells --seconds 300 --cells tp2:.*llada",
        (r"^\| etp2 \| llada_moe masked \| fp32 \| equal ",), processes=2,
    ),
    Case(
        "layouts/runs.py",  # without those that torchrun has to start again
        "--output {out}/runs --only ^(dp:.resumed|sgd|routers|tp2.to|ep2|straggler|NaN)",
        tuple(rf"^\| {run} \| holds " for run in ("dp: resumed, exported", "routers in fp32.*", "NaN guard")),
        processes=2,
    ),
    Case("layouts/all_gpus.py", "--output {out}/all --seconds 1 --limit 120 --parts cells2_0", (r"^cells2_0: ",)),
    Case(
        "throughput.py", "--size tiny --batch 2 --new-tokens 16 --block-length 8 --ways plain eager",
        (r"^\| tiny/2/none/plain \|", r"^\| tiny/2/dual-ragged/eager \|"),
    ),
    Case(
        "network.py", "--model tiny --batch 2 --seq-length 16 --steps 2 --precision fp32",
        tuple(rf'"layout": "{layout}", "one node": {NUMBER}, "two nodes": {NUMBER}' for layout in ("ddp", "fsdp2")),
    ),
    Case("support_matrix.py", "--json {out}/matrix.json", (r"^\| tp2 \| equal \|",)),
)  # fmt: skip
# Peers that a checkout or a package brings: the script, the side, and the package, or the variable with the checkout.
PEERS = (
    ("generate.py", "--case dual --size tiny --length 16 --block 8 --executions eager --fast-dllm", "FAST_DLLM", ""),
    (
        "throughput.py", "--size tiny --batch 2 --new-tokens 16 --block-length 8 --ways fast-dllm --fast-dllm",
        "FAST_DLLM", "",
    ),
    ("preprocess.py", "--megabytes 0.3 --rounds 1 --workers 2 --megatron-lm", "MEGATRON_LM", ""),
    (
        "engine_throughput.py", "--output {out} --size sdar-tiny --rows 2 --new-tokens 8 -- "
        "python -m sglang.launch_server --dllm-algorithm LowConfidence --model-path", "", "sglang",
    ),
    ("layouts/one_step.py", "--smoke --output {out}/smoke", "", "transformer_engine"),
    ("fsdp_building.py", "--model {out}", "", "transformer_engine"),  # megatron-core's FSDP needs GPUs
)  # fmt: skip


def runs(case: Case, folder: Path) -> None:
    """The command ends with its code, and prints a line for each side."""
    if not MEGATRON and case.script in NEEDS_MEGATRON:
        pytest.skip("megatron-core is not installed")
    if "TRITON_INTERPRET" in case.environment:
        pytest.importorskip("triton")
    words = [word.format(out=folder) for word in case.words.split()]
    logs = [folder / f"log_{rank}.txt" for rank in range(case.processes)]
    each = [{**environment, **case.environment} for environment in environments(case.processes)]
    arguments = [*(["--cuda"] if case.cuda else []), case.script, *words]
    ended = launcher.run("tests.benchmark_worker", arguments, each, logs, 1500)
    said = logs[0].read_text(errors="replace")
    assert ended, said[-4000:]
    for line in case.printed:
        assert re.search(line, said, re.MULTILINE), f"{line}:\n{said[-4000:]}"
    assert "Traceback" not in said, said[-4000:]


@pytest.mark.extension("parallel", "kernels", "train.rl")
@pytest.mark.parametrize("case", FAST, ids=lambda case: f"{case.script} {case.words[:20]}")
def test_a_benchmark_runs(case: Case, tmp_path: Path) -> None:
    if case.script == "structured.py":
        write_tokenizer(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
        for name, schema in {"a": {"type": "object"}, "b/two": {"contains": {}}, "c": {"enum": ["é", 1]}}.items():
            path = tmp_path / "schemas" / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(schema))
    runs(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: f"{case.script} {case.words[:20]}")
def test_a_long_benchmark_runs(case: Case, tmp_path: Path) -> None:
    if case.script == "fsdp_building.py":
        shapes = importlib.import_module("shapes").SHAPES
        (tmp_path / "config.json").write_text(json.dumps(shapes["tiny"]))
    if case.script == "adaptation_forms.py":
        write_sums(tmp_path / "model", tmp_path / "data")
    runs(case, tmp_path)


def write_sums(model: Path, data: Path) -> None:
    """A random autoregressive model with a chat template, and sums in GSM8K's format."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=258)).save_pretrained(model)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": template}
    write_tokenizer(model, tokenizer)
    data.mkdir()
    for split, count in (("train", 20), ("test", 5)):
        rows = [
            {"question": f"{n} and {n}?", "answer": f"So\n<<{n}+{n}={2 * n}>>{2 * n} it is.\n#### {2 * n}"}
            for n in range(count)
        ]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize(("script", "words", "checkout", "package"), PEERS)
def test_a_peer_that_is_not_a_requirement_runs(
    script: str, words: str, checkout: str, package: str, tmp_path: Path
) -> None:
    if checkout and checkout not in os.environ:
        pytest.skip(f"{script}: the peer's checkout is not here: its folder is ${checkout}")
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{script}: {package} is not installed")
    more = f" {os.environ[checkout]}" if checkout else ""
    runs(Case(script, words + more, ()), tmp_path)


def test_every_benchmark_has_a_case() -> None:
    scripts = {
        path.relative_to(BENCHMARKS).as_posix()
        for path in Path(BENCHMARKS).rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    elsewhere = {"serving_load.py"}  # run by tests/replica_router, with a model that it serves
    assert scripts == elsewhere | {case.script for case in (*FAST, *SLOW)}
