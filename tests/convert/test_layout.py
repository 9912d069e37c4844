"""Layouts: placement of layers and ranks, refusals, and the layouts that they propose instead."""

from __future__ import annotations

import pytest

from dlm_bridge import DlmBridgeError, Layout
from dlm_bridge.mapping.layout import parse_pipeline_split
from dlm_bridge.mapping.rules import Dims

DENSE = Dims(layers=8, hidden=64, heads=8, groups=4, head_dim=8, ffn=96, vocab=128)
MOE = Dims(layers=4, hidden=64, heads=4, groups=4, head_dim=16, ffn=0, vocab=128, experts=8, moe_ffn=32)


def test_stages_even() -> None:
    assert Layout(pp=2).stages(4) == [[[0, 1]], [[2, 3]]]


def test_virtual_chunks_interleave() -> None:
    assert Layout(pp=2, vp=2).stages(8) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_first_and_last_stage() -> None:
    assert Layout(pp=4, first_stage=1, last_stage=3).stages(8) == [[[0]], [[1, 2]], [[3, 4]], [[5, 6, 7]]]
    assert Layout(pp=2, first_stage=3).stages(8) == [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]
    assert Layout(pp=2, vp=2, first_stage=2, last_stage=4).stages(6) == [[[0], [3]], [[1, 2], [4, 5]]]


def test_layout_string() -> None:
    layout = Layout(pp=2, pipeline="Et*2|t*3|(tt|)*1tL")
    assert layout.vp == 2
    assert layout.stages(8) == [[[0, 1], [5, 6]], [[2, 3, 4], [7]]]
    assert Layout(pp=3, pipeline="E|t*8|L").stages(8) == [[[]], [list(range(8))], [[]]]


@pytest.mark.parametrize(
    ("pp", "vp", "layers", "text"),
    [(2, 1, 5, "Ettt|ttL"), (2, 2, 6, "Et|t,t|t*1|(t)*2L"), (4, 1, 9, "Et*3|(tt|)*2t*2L")],
)
def test_layout_string_as_megatron_reads_it(pp: int, vp: int, layers: int, text: str) -> None:
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    theirs = module.PipelineParallelLayerLayout(text, pp).layout
    counts = [[theirs[p][v].count(module.LayerType.decoder) for v in range(vp)] for p in range(pp)]
    ours = Layout(pp=pp, vp=vp, pipeline=text).stages(layers)
    assert [[len(chunk) for chunk in rank] for rank in ours] == counts
    assert [layer for v in range(vp) for p in range(pp) for layer in ours[p][v]] == list(range(layers))


@pytest.mark.parametrize(
    ("text", "pp", "vp", "stages"),
    [
        ("3,5", 2, 1, [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]),
        ("1,3", 4, 1, [[[0]], [[1, 2]], [[3, 4]], [[5, 6, 7]]]),
        ("3,3,2", 3, 1, [[[0, 1, 2]], [[3, 4, 5]], [[6, 7]]]),
        ("4,2,2", 3, 2, [[[0, 1], [4, 5]], [[2], [6]], [[3], [7]]]),
        ("Et*5|t*3L", 2, 1, [[[0, 1, 2, 3, 4]], [[5, 6, 7]]]),
    ],
)
def test_pipeline_split(text: str, pp: int, vp: int, stages: list[list[list[int]]]) -> None:
    assert Layout(pp=pp, vp=vp, **parse_pipeline_split(text, pp, vp)).stages(8) == stages


def test_proposed_splits_work() -> None:
    with pytest.raises(DlmBridgeError, match=r"--pp 3 .*--pipeline-split 3,3,2"):
        Layout(pp=3).check(DENSE)
    Layout(pp=3, **parse_pipeline_split("3,3,2", 3)).check(DENSE)
    with pytest.raises(DlmBridgeError) as refused:
        Layout(pp=3, vp=2).check(DENSE)
    proposal = str(refused.value).rpartition("--pipeline-split ")[2].strip("'")
    Layout(pp=3, vp=2, **parse_pipeline_split(proposal, 3, 2)).check(DENSE)
    with pytest.raises(DlmBridgeError, match=r"has 7 layers, the model has 8: use 'Et\*4\|t\*4L'"):
        Layout(pp=2, pipeline="Ettt|ttttL").check(DENSE)
    with pytest.raises(DlmBridgeError, match="first stage 7, last stage 2: use --pipeline-split 4,4"):
        Layout(pp=2, first_stage=7, last_stage=2).check(DENSE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "--tp must be a positive whole number"),
        ({"pp": -1}, "--pp must be"),
        ({"tp": 1.5}, "--tp must be"),
        ({"vp": 2}, "--vp 2 needs --pp"),
        ({"first_stage": 2}, "need --pp of at least 2"),
        ({"pp": 2, "first_stage": 2, "pipeline": "Et|tL"}, "not both"),
        ({"pp": 2, "pipeline": "Et|t|tL"}, "3 stages, which --pp 2 does not divide"),
        ({"pp": 2, "pipeline": "Ett"}, "end with one L"),
        ({"pp": 2, "pipeline": "Etx|tL"}, "'x' is not one of"),
        ({"pp": 2, "pipeline": "Et|tmL"}, "multi-token"),
        ({"pp": 2, "pipeline": "Et*99999999|tL"}, "too many"),
    ],
)
def test_impossible_sizes(fields: dict[str, object], message: str) -> None:
    with pytest.raises(DlmBridgeError, match=message.replace("(", r"\(")):
        Layout(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=8), "--tp 8 does not divide the 4 query groups"),
        (Layout(tp=3), "choose one of 1, 2, 4"),
        (Layout(pp=16), "--pp 16 needs at least 16 layers, the model has 8"),
        (Layout(ep=2), "--ep 2: the model is dense"),
        (Layout(tp=2, etp=4), "--etp 4: the model is dense"),
    ],
)
def test_sizes_that_the_model_cannot_have(layout: Layout, message: str) -> None:
    with pytest.raises(DlmBridgeError, match=message):
        layout.check(DENSE)


def test_experts() -> None:
    Layout(tp=2, ep=4, etp=1).check(MOE)
    assert Layout(tp=2, pp=2, ep=4, etp=1).world_size == 8
    with pytest.raises(DlmBridgeError, match="--ep 3 does not divide the 8 experts"):
        Layout(ep=3).check(MOE)


@pytest.mark.parametrize("text", ["a", "1", "1,2,3", "0,4", "3;2", ""])
def test_split_that_means_nothing(text: str) -> None:
    with pytest.raises(DlmBridgeError, match="--pipeline-split"):
        parse_pipeline_split(text, 4)
