"""The time model: its counts by hand, and docs/planning.md's comparison with published runs as recorded output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dlm_bridge import Layout
from dlm_bridge.errors import SettingError
from dlm_bridge.plan.cost import StepTime, elementwise_bytes, step_time
from dlm_bridge.plan.hardware import Hardware
from dlm_bridge.plan.model import PlannedModel, model_of
from dlm_bridge.plan.run import PlannedRun
from tests.plan import configs
from tests.plan.published_runs import AIM, H100, PUBLISHED, table
from tests.refusals import refused

PAGE = Path(__file__).parents[2] / "docs/planning.md"
NVLINK, NETWORK = 450e9 * 0.75, 50e9 * 0.75  # bytes/s
RUN = PlannedRun(layout=Layout(), gpus=8, seq_length=4096, global_batch_size=8)


def dense() -> PlannedModel:
    """32 layers of 218,103,808 parameters without norms, hidden 4,096, 32 heads of 128 in 8 groups, 14,336 rows."""
    return model_of(configs.LLAMA_3_8B, "8B")


def timed(**changes: object) -> StepTime:
    return step_time(dense(), replace(RUN, **changes), H100)  # type: ignore[arg-type]


def test_the_page_has_what_the_model_predicts() -> None:
    lines = PAGE.read_text().splitlines()
    first = lines.index("| run | GPUs | published, s | predicted, s | difference |")
    assert lines[first : first + len(PUBLISHED) + 2] == list(table())


def test_which_published_runs_are_beyond_the_aim() -> None:
    """None of 1,024 GPUs and more."""
    missed = [run.name for run in PUBLISHED if abs(run.planned().total / run.seconds - 1) > AIM]
    assert missed == [
        "Megatron-LM 1T, A100, TP8 PP64 VP1, batch 512",
        "ours, H200: 8B, FP8, DP4",
    ]


def test_matrix_products_attention_and_bytes_of_a_step() -> None:
    """One row of 4,096 tokens a GPU: three passes over products, three and a half over attention."""
    filled = 4096 / (4096 + 256)
    products = 2 * 218_103_808 * 4096 / (989e12 * 0.66 * filled)
    attention = 2 * (4096 + 4096) * 4096 / 2 * 4096 / (989e12 * 0.6)
    between = 188_416 * 4096 / (3.35e12 * 0.91)
    head = 2 * 128256 * 4096 * 4096 / (989e12 * 0.66 * filled)
    expected = 32 * (3 * products + 3.5 * attention + 3 * between) + 3 * head
    assert timed().compute == pytest.approx(expected, rel=1e-6)


def test_bytes_between_the_products() -> None:
    model = dense()
    assert elementwise_bytes(model, RUN, False) == 2 * 10 * 4096 + 2 * (2 * (4096 + 1024) + 3 * 14336) == 188_416
    halved = replace(RUN, layout=Layout(tp=2))
    assert elementwise_bytes(model, halved, False) == 94_208
    assert elementwise_bytes(model, replace(halved, sequence_parallel=False), False) == 94_208 + 10 * 4096
    casts = 4 * (2 * 4096 + 4096 + 14336)
    assert elementwise_bytes(model, replace(RUN, precision="fp8"), False) == 188_416 + casts
    assert elementwise_bytes(model, replace(RUN, precision="fp32"), False) == 2 * 188_416


def test_fp8_doubles_the_rate_of_products_alone() -> None:
    bf16, fp8 = timed(), timed(precision="fp8")
    filled = 4096 / (4096 + 256)
    products = 3 * 2 * (32 * 218_103_808 + 128256 * 4096) * 4096 / (989e12 * 0.66 * filled)
    casts = 32 * 3 * 106_496 * 4096 / (3.35e12 * 0.91)
    assert bf16.compute - fp8.compute == pytest.approx(products / 2 - casts, rel=1e-6)


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_parallel_bytes(tp: int) -> None:
    """Eight collectives a layer in each of tp micro-batches, of (tp - 1) / tp of its hidden states in 16 bits."""
    found = timed(layout=Layout(tp=tp)).tensor_parallel
    each = (tp - 1) / tp * 2 * 4096 * 4096 / NVLINK + 3e-5
    assert found == pytest.approx(tp * 32 * 8 * each, rel=1e-6)


def test_overlap_hides_half_where_there_is_as_much_to_hide_it_behind() -> None:
    plain = timed(layout=Layout(tp=8))
    assert timed(layout=Layout(tp=8), tp_overlap=True).tensor_parallel == pytest.approx(plain.tensor_parallel / 2)
    slow = replace(H100, nvlink=1e9)
    run = replace(RUN, layout=Layout(tp=8))
    found, without = (step_time(dense(), replace(run, tp_overlap=on), slow).tensor_parallel for on in (True, False))
    filled = 4096 / (4096 + 256)
    products = 8 * 32 * 3 * 2 * 218_103_808 / 8 * 4096 / (989e12 * 0.66 * filled)
    assert found == pytest.approx(without - products, rel=1e-6)

    model = model_of(configs.LLADA_MOE, "moe")
    experts = replace(RUN, layout=Layout(ep=8), global_batch_size=16)
    alone, beside = (step_time(model, replace(experts, ep_overlap=on), H100) for on in (False, True))
    assert beside.expert_parallel == pytest.approx(alone.expert_parallel / 2)
    single = replace(experts, global_batch_size=8, ep_overlap=True)  # no other micro-batch
    assert step_time(model, single, H100).expert_parallel == pytest.approx(alone.expert_parallel / 2)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (configs.DEEPSEEK_V3, {"tp_overlap": True}, "tp_overlap"),
        (configs.LLADA_MOE, {"moe_dispatcher": "allgather"}, "moe_dispatcher"),
        (configs.LLADA_MOE, {"fsdp": "optim"}, "fsdp"),
        (configs.LLADA_MOE, {"recompute": "full"}, "recompute"),
        (configs.LLADA_MOE, {"layout": Layout(pp=2, ep=2)}, "vp"),
    ],
)
def test_overlap_that_megatron_core_does_not_have(
    config: dict[str, object], changes: dict[str, object], named: str
) -> None:
    run = replace(RUN, **{"layout": Layout(ep=2), "ep_overlap": "tp_overlap" not in changes, **changes})  # type: ignore[arg-type]
    with refused(SettingError, None, named):
        run.check(model_of(config, "model"))


@pytest.mark.parametrize(("vp", "bubble"), [(1, 3 / 16), (2, 3 / 32), (8, 3 / 128)])
def test_the_bubble(vp: int, bubble: float) -> None:
    """(pp - 1) / (vp x micro-batches) of the slowest stage's work: 4 stages, 16 micro-batches."""
    found = timed(layout=Layout(pp=4, vp=vp), global_batch_size=32)
    assert found.pipeline_bubble == pytest.approx(bubble * (found.compute + found.tensor_parallel), rel=1e-6)


def test_messages_between_stages() -> None:
    """Hidden states there and their gradients back for each of 16 micro-batches, and filling and draining."""
    found = timed(layout=Layout(pp=4), global_batch_size=32).pipeline_messages
    message = 2 * 4096 * 4096 / NVLINK
    assert found == pytest.approx(2 * 16 * (3e-5 + message) + 2 * 3 * message, rel=1e-6)


def test_data_parallel_bytes_across_nodes() -> None:
    """Gradients in fp32 and weights in bf16, (dp - 1) / dp of them: a tenth stays visible behind much computation, and
    all that a short last micro-batch does not hide."""
    parameters = 8_030_261_248 - 4096  # the final norm is left out
    seconds = 6 * parameters * 1023 / 1024 / NETWORK
    long = timed(gpus=1024, seq_length=65536, global_batch_size=1024)
    assert long.data_parallel == pytest.approx(0.1 * seconds, rel=1e-6)
    short = timed(gpus=1024, seq_length=1024, global_batch_size=1024)
    assert short.data_parallel == pytest.approx(seconds - short.compute, rel=1e-6)


def test_an_instance_of_the_optimizer_on_each_node() -> None:
    """Gradients and weights stay inside; a rank's eighth of the fp32 gradients is summed between the nodes, in two
    passes. Each rank updates an eighth."""
    parameters = 8_030_261_248 - 4096
    run = {"gpus": 1024, "seq_length": 1024, "global_batch_size": 1024}
    found, whole = timed(**run, optimizer_instances=128), timed(**run)
    seconds = parameters * (6 * 7 / 8 / NVLINK + 2 * 4 / 8 * 127 / 128 / NETWORK)
    assert found.data_parallel == pytest.approx(seconds - found.compute, rel=1e-6)
    assert found.optimizer == pytest.approx(128 * whole.optimizer, rel=1e-6)


def test_assumptions_name_the_rates() -> None:
    text = "\n".join(replace(Hardware(), flops=312e12, network=25e9, per_node=4).assumptions())
    for part in ("312 TFLOP/s", "66%", "60%", "3.35 TB/s", "91%", "450 GB/s among 4 GPUs", "network 25 GB/s", "75%"):
        assert part in text, part
