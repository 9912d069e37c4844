"""Layouts: placement of layers and ranks, refusals, and the layouts that they propose instead."""

from __future__ import annotations

import pytest

from dlm_bridge import Layout
from dlm_bridge.errors import DlmBridgeError, LayoutError, SettingError
from dlm_bridge.mapping.layout import parse_pipeline_split
from dlm_bridge.mapping.rules import Dims
from tests.refusals import refused

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
    with refused(LayoutError, "pp", "3,3,2"):
        Layout(pp=3).check(DENSE)
    Layout(pp=3, **parse_pipeline_split("3,3,2", 3)).check(DENSE)
    with refused(LayoutError, "pp") as raised:
        Layout(pp=3, vp=2).check(DENSE)
    proposal = str(raised.value).rpartition("`pipeline_split=")[2].strip("'`")
    Layout(pp=3, vp=2, **parse_pipeline_split(proposal, 3, 2)).check(DENSE)
    with refused(LayoutError, "pipeline_split", "'Et*4|t*4L'"):
        Layout(pp=2, pipeline="Ettt|ttttL").check(DENSE)
    with refused(LayoutError, "pipeline_split", "4,4"):
        Layout(pp=2, first_stage=7, last_stage=2).check(DENSE)


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"tp": 0}, SettingError, "tp"),
        ({"pp": -1}, SettingError, "pp"),
        ({"tp": 1.5}, SettingError, "tp"),
        ({"vp": 2}, SettingError, "vp"),
        ({"first_stage": 2}, SettingError, "pipeline_split"),
        ({"pp": 2, "first_stage": 2, "pipeline": "Et|tL"}, SettingError, "pipeline_split"),
        ({"pp": 2, "pipeline": "Et|t|tL"}, LayoutError, "pipeline_split"),
        ({"pp": 2, "pipeline": "Ett"}, SettingError, "pipeline_split"),
        ({"pp": 2, "pipeline": "Etx|tL"}, SettingError, "pipeline_split"),
        ({"pp": 2, "pipeline": "Et|tmL"}, SettingError, "pipeline_split"),
        ({"pp": 2, "pipeline": "Et*99999999|tL"}, SettingError, "pipeline_split"),
    ],
)
def test_impossible_sizes(fields: dict[str, object], kind: type[DlmBridgeError], field: str) -> None:
    with refused(kind, field):
        Layout(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "dims", "field", "named"),
    [
        (Layout(tp=8), DENSE, "tp", "8 does not divide the 4"),
        (Layout(tp=3), DENSE, "tp", "1, 2, 4"),
        (Layout(pp=16), DENSE, "pp", "16"),
        (Layout(ep=2), DENSE, "ep", "no experts"),
        (Layout(tp=2, etp=4), DENSE, "etp", "no experts"),
        (Layout(ep=3), MOE, "ep", "3 does not divide the 8"),
    ],
)
def test_sizes_that_do_not_fit_the_model(layout: Layout, dims: Dims, field: str, named: str) -> None:
    with refused(LayoutError, field, named):
        layout.check(dims)


def test_experts() -> None:
    Layout(tp=2, ep=4, etp=1).check(MOE)
    assert Layout(tp=2, pp=2, ep=4, etp=1).world_size == 8


@pytest.mark.parametrize(
    ("text", "kind"), [("a", SettingError), ("1,2,3", LayoutError), ("0,4", SettingError), ("", SettingError)]
)
def test_invalid_split(text: str, kind: type[DlmBridgeError]) -> None:
    with refused(kind, "pipeline_split"):
        parse_pipeline_split(text, 4)
