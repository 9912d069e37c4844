"""The in-place attention kernel against PyTorch's attention: on a GPU, or on a CPU in Triton's interpreter."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu(optional=True)

from dlm_bridge.generation.runtime.attention import attend_torch  # noqa: E402
from dlm_bridge.kernels import sampling  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
ERRORS = {torch.float32: 1e-5, torch.float16: 1e-3} | ({} if INTERPRETED else {torch.bfloat16: 8e-3})
# batch, groups, heads of a group, new positions, head size, first new column, end, width of the buffers
SHAPES = [
    (1, 2, 1, 1, 64, 0, 1, 64),
    (2, 1, 4, 4, 128, 96, 100, 128),
    (5, 2, 4, 4, 16, 60, 64, 192),
    (3, 2, 8, 4, 64, 33, 37, 40),
    (1, 2, 1, 32, 128, 70, 301, 320),
    (1, 1, 7, 33, 64, 130, 170, 192),
    (1, 1, 1, 64, 32, 0, 64, 64),
]

PRODUCT = [*itertools.product(SHAPES, ERRORS, (False, True), (None, 1, 3))]
# The interpreter is slow: of each shape one launch of each kind, and fp16 where its own kernel sums the parts.
INTERPRETED_CASES = [
    (shape, dtype, masked, splits)
    for shape, dtype, masked, splits in PRODUCT
    if (masked, splits) in (((False, None), (True, 1), (True, 3)) if dtype == torch.float32 else ((True, 3),))
]
CASES = INTERPRETED_CASES if INTERPRETED else PRODUCT


def case(shape: tuple[int, ...], dtype: torch.dtype, masked: bool) -> tuple[dict[str, object], torch.Tensor]:
    """The kernel's arguments, and what attention gives in float64."""
    batch, groups, shared, width, size, first, end, columns = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(DEVICE, dtype)

    # Views, as one product's slices turned by their positions are.
    query = random(batch, width, groups * shared, size).transpose(1, 2)
    key, value = random(batch, width, 2 * groups, size).transpose(1, 2).chunk(2, dim=1)
    keys, values = (random(batch + 2, groups, columns, size)[:batch] for _ in range(2))
    keys[:, :, end:] = torch.nan  # what no one may look at
    keys[:, :, first : first + width], values[:, :, first : first + width] = torch.nan, torch.nan
    mask = None
    if masked:
        mask = torch.rand(batch, 1, 1, end, generator=generator).to(DEVICE) > 0.3
        mask[0, ..., : end // 2] = False  # padding in front of a row
        mask[..., first] = True
    whole_keys, whole_values = keys[:, :, :end].clone(), values[:, :, :end].clone()
    whole_keys[:, :, first : first + width], whole_values[:, :, first : first + width] = key, value
    expected = scaled_dot_product_attention(
        query.double(),
        whole_keys.double().repeat_interleave(shared, dim=1),
        whole_values.double().repeat_interleave(shared, dim=1),
        attn_mask=mask,
    ).transpose(1, 2)
    arguments = {"query": query, "key": key, "value": value, "key_cache": keys, "value_cache": values}
    arguments |= {"columns": torch.arange(first, first + width, device=DEVICE), "end": end, "mask": mask}
    return arguments | {"scaling": None}, expected


@pytest.mark.parametrize(("shape", "dtype", "masked", "splits"), CASES, ids=str)
@pytest.mark.fast(
    "(3, *float16-True-3", "(1, 1, 7*float32-True-3", "(1, 2, 1, 32*float32-True-3", "(5, *float32-False-None"
)
def test_against_float64(shape: tuple[int, ...], dtype: torch.dtype, masked: bool, splits: int | None) -> None:
    arguments, expected = case(shape, dtype, masked)
    key, value, keys, values = (arguments[name].clone() for name in ("key", "value", "key_cache", "value_cache"))
    output = sampling.attend(**arguments, splits=splits)
    error = (output.double() - expected).norm() / expected.norm()
    assert error < ERRORS[dtype]
    first, width = int(arguments["columns"][0]), key.shape[2]
    for kept, before, new in ((arguments["key_cache"], keys, key), (arguments["value_cache"], values, value)):
        before[:, :, first : first + width] = new
        torch.testing.assert_close(kept, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("masked", "splits"), [pytest.param(False, 1, marks=pytest.mark.slow), (True, 2)])
@pytest.mark.parametrize(
    ("shape", "block"), [((3, 2, 4, 8, 16, 56, 64, 192), 4), ((2, 1, 2, 48, 32, 81, 129, 192), 16)]
)
@pytest.mark.fast("shape0-*")
def test_blocks_of_which_each_sees_those_before(shape: tuple[int, ...], block: int, masked: bool, splits: int) -> None:
    """One launch for two or three blocks returns and caches the same as one launch per block."""
    arguments, _ = case(shape, torch.float32, masked)
    first, end = shape[5:7]
    alone = arguments | {name: arguments[name].clone() for name in ("key_cache", "value_cache")}
    mask = arguments["mask"]
    expected = []
    for begin in range(0, end - first, block):
        part = {name: arguments[name][:, :, begin : begin + block] for name in ("query", "key", "value")}
        seen = first + begin + block
        part |= {"end": seen, "columns": arguments["columns"][begin : begin + block]}
        expected.append(sampling.attend(**alone | part | {"mask": mask if mask is None else mask[..., :seen]}))
    output = sampling.attend(**arguments, block=block, splits=splits)
    torch.testing.assert_close(output, torch.cat(expected, dim=1), rtol=1e-5, atol=1e-5)
    for name in ("key_cache", "value_cache"):
        torch.testing.assert_close(arguments[name], alone[name], rtol=0, atol=0, equal_nan=True)
    whole = sampling.attend(**arguments, splits=splits)
    assert not torch.allclose(output[:, :block], whole[:, :block], atol=1e-3)


@pytest.mark.parametrize(("masked", "splits"), [(False, 1), (True, 3)])
def test_a_length_that_the_device_knows(masked: bool, splits: int) -> None:
    """One launch serves every length, which the kernel reads from the device."""
    arguments, expected = case(SHAPES[5], torch.float32, masked)
    mask, end, columns = arguments["mask"], arguments["end"], arguments["key_cache"].shape[2]
    if masked:
        arguments["mask"] = torch.nn.functional.pad(mask, (0, columns - end), value=True)
    ends = torch.tensor([end], dtype=torch.int32, device=DEVICE)
    output = sampling.attend(**arguments | {"end": columns}, length=ends, splits=splits)
    assert (output.double() - expected).norm() / expected.norm() < ERRORS[torch.float32]


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.fast("2")
def test_columns_of_each_row(splits: int) -> None:
    """Padding before and behind a row's new columns goes to the last one of the buffers; repeated ones count once."""
    generator = torch.Generator().manual_seed(0)
    heads, groups, width, size, end, columns = 4, 2, 4, 16, 90, 96
    query, key, value = (
        torch.randn(4, count, width, size, generator=generator).to(DEVICE) for count in (heads, groups, groups)
    )
    key[3, :, 2:], value[3, :, 2:] = key[3, :, :2], value[3, :, :2]
    caches = torch.randn(2, 4, groups, columns, size, generator=generator).to(DEVICE)
    spare = columns - 1
    own = [[70, 71, 72, 73], [spare, spare, 5, 6], [88, 89, spare, spare], [8, 9, 8, 9]]
    own_BQ = torch.tensor(own, device=DEVICE)
    mask = torch.arange(columns, device=DEVICE) < torch.tensor([80, 70, 90, 20], device=DEVICE)[:, None, None, None]
    expected_caches = caches.clone()
    given = (own_BQ, end, mask[..., :end], None, None, None)
    expected = attend_torch(query, key, value, *expected_caches, *given)
    for length in (None, torch.tensor([end], dtype=torch.int32, device=DEVICE)):
        found_caches = caches.clone()
        seen = end if length is None else columns
        arguments = (own_BQ, seen, mask[..., :seen], None, length)
        output = sampling.attend(query, key, value, *found_caches, *arguments, splits=splits)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found_caches[..., :spare, :], expected_caches[..., :spare, :])


def test_a_row_that_may_look_at_nothing_gets_zero() -> None:
    arguments, _ = case(SHAPES[2], torch.float32, masked=True)
    arguments["mask"][1] = False
    for splits in (1, 2):
        output = sampling.attend(**arguments, splits=splits)
        assert output.isfinite().all()
        assert output[1].eq(0).all()
