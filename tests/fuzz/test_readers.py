"""Any bytes in place of a checkpoint's: one DlmBridgeError, or a result that is right; never absurd memory.

The seeds that once found something stand as explicit examples.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.checkpoints.torch_dist import TorchDistReader, object_item
from dlm_bridge.convert.formats.dcp import open_tensor_item, read_item_rows, read_metadata
from dlm_bridge.convert.formats.hub_weights import HubReader, build_header
from dlm_bridge.convert.streaming import raw_bytes
from dlm_bridge.files.pickles import RestrictedUnpickler
from tests.checkpoints import write_llada
from tests.fuzz.hostile import BOMBS
from tests.processes import limited_memory

pytestmark = pytest.mark.slow
FUZZ = settings(
    max_examples=150, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
ROOM = 1 << 30  # bytes that the readers may ask the system for, in vain or not, in all of this module

# Changes to some bytes: (where, as a share of the length), (what is put there), (how much of the old goes).
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.one_of(st.binary(max_size=6), st.just(b"\xff" * 8)), st.integers(0, 12)),
    min_size=1, max_size=3,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def little_room() -> Iterator[None]:
    """An absurd allocation fails at once, and a MemoryError is no DlmBridgeError."""
    with limited_memory(ROOM):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Hub checkpoint and its Megatron twin; the tests spoil one file and put it back."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_llada(folder / "hub", n_layers=1, d_model=8, n_heads=2, n_kv_heads=2, mlp_hidden_size=8, shards=2)
    Bridge.from_hf(folder / "hub").to_megatron(folder / "m", Layout(tp=2))
    return folder / "hub", folder / "m"


def edited(data: bytes, edits: list[tuple[float, bytes, int]]) -> bytes:
    for share, new, gone in edits:
        place = int(share * len(data))
        data = data[:place] + new + data[place + gone :]
    return data


def refused_or(read: Callable[[], Any]) -> Any:
    """What `read` gives, None where it is refused in one line."""
    try:
        return read()
    except DlmBridgeError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    assert len(message) < 2000
    return None


class Spoilt:
    """A file with other bytes while the block runs."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data, self._before = path, data, path.read_bytes()

    def __enter__(self) -> None:
        self._path.write_bytes(self._data)

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._before)


def open_whole(folder: Path) -> list[str]:
    return Bridge.from_megatron(folder).checkpoint.check()


def read_hub(folder: Path) -> dict[str, torch.Tensor]:
    reader = HubReader(folder)
    return {name: reader.read(name) for name in reader.names}


@FUZZ
@given(edits=EDITS)
def test_safetensors_bytes(folders: tuple[Path, Path], edits: list[tuple[float, bytes, int]]) -> None:
    path = folders[0] / "model-00001-of-00002.safetensors"
    with Spoilt(path, edited(path.read_bytes(), edits)):
        tensors = refused_or(lambda: read_hub(folders[0]))
        assert tensors is None or sum(tensor.nbytes for tensor in tensors.values()) < 1 << 20


NUMBERS = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**53, 2**60, 2**63, 2**64, 10**40]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@FUZZ
@given(
    entry=st.one_of(
        st.fixed_dictionaries({
            "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "I64", "F4", ""]),
            "shape": st.lists(NUMBERS, max_size=4),
            "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2),
        }),
        VALUES,
    ),
    metadata=VALUES,
)  # fmt: skip
@example(entry={"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}, metadata=None)
@example(entry={"dtype": "F32", "shape": [2**32, 2**32, 0], "data_offsets": [0, 0]}, metadata=None)
@example(entry={"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}, metadata={"format": "pt"})
def test_safetensors_headers(tmp_path: Path, entry: Any, metadata: Any) -> None:
    text = json.dumps({"a": entry, **({} if metadata is None else {"__metadata__": metadata})}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    tensors = refused_or(lambda: read_hub(tmp_path))
    assert tensors is None or tensors["a"].nbytes <= 64


FILES = ["x.safetensors", "../x.safetensors", "/etc/passwd", "l.safetensors", "d.safetensors"]


@FUZZ
@given(
    index=st.one_of(
        st.fixed_dictionaries({"weight_map": st.dictionaries(
            st.sampled_from(["a", "b", ""]),
            st.one_of(
                VALUES,
                st.sampled_from(FILES),
            ),
            max_size=3,
        )}),
        VALUES,
    )
)  # fmt: skip
@example(index={"weight_map": {"a": "d.safetensors/../../x.safetensors"}})
@example(index={"weight_map": {"a": "x.safetensors\0"}})
def test_index(tmp_path: Path, index: Any) -> None:
    folder = tmp_path / "in"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    header, entries = build_header(None, [("a", torch.float32, (2,))])
    for file in (folder / "x.safetensors", tmp_path / "x.safetensors"):
        file.write_bytes(header + bytes(entries[0].nbytes))
    (folder / "l.safetensors").symlink_to(tmp_path / "x.safetensors")
    (folder / "d.safetensors").mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = refused_or(lambda: read_hub(folder))
    if tensors is not None:
        assert index["weight_map"] == {"a": "x.safetensors"}


@FUZZ
@given(edits=EDITS)
@example(edits=[(1.0, b"", 0), (0.0, b"", 20)])
def test_metadata_bytes(folders: tuple[Path, Path], edits: list[tuple[float, bytes, int]]) -> None:
    path = folders[1] / "iter_0000000" / ".metadata"
    with Spoilt(path, edited(path.read_bytes(), edits)):
        refused_or(lambda: read_metadata(path.parent))
        refused_or(partial(open_whole, folders[1]))


PATHS = st.sampled_from(["", ".", "..", "/", "a\0b", "x" * 5000, "../x", "common.pt", "\ud800"])


@FUZZ
@given(
    field=st.sampled_from(["size", "offsets", "sizes", "fqn", "offset", "relative_path", "place", "length", "dtype"]),
    value=st.one_of(VALUES, PATHS, NUMBERS, st.lists(NUMBERS, max_size=4)),
    which=st.integers(0, 5),
)
@example(field="relative_path", value="x" * 5000, which=0)
@example(field="relative_path", value="\ud800", which=0)
@example(field="fqn", value=[], which=0)
def test_metadata_values(folders: tuple[Path, Path], field: str, value: Any, which: int) -> None:
    """A sound pickle with one value that is none of torch's."""
    path = folders[1] / "iter_0000000" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    stored = [item for item in metadata.state_dict_metadata.values() if hasattr(item, "chunks")][which]
    index = list(metadata.storage_data)[which]
    owner, name = {
        "size": (stored, "size"),
        "offsets": (stored.chunks[0], "offsets"),
        "sizes": (stored.chunks[0], "sizes"),
        "fqn": (index, "fqn"),
        "offset": (index, "offset"),
        "relative_path": (metadata.storage_data[index], "relative_path"),
        "place": (metadata.storage_data[index], "offset"),
        "length": (metadata.storage_data[index], "length"),
        "dtype": (stored.properties, "dtype"),
    }[field]
    object.__setattr__(owner, name, value)
    if field in ("fqn", "offset"):  # pickled as it stands: its hash is another one now
        metadata.storage_data = Items(metadata.storage_data.items())
    with Spoilt(path, pickle.dumps(metadata)):
        refused_or(partial(open_whole, folders[1]))


class Items(list):  # type: ignore[type-arg]
    """Pickles as a dict of its pairs, whether or not they can be looked up."""

    def __reduce_ex__(self, _: Any) -> Any:
        return OrderedDict, (), None, None, iter(self)


def bomb(depth: int) -> Any:
    value: Any = "x" * 64
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "data",
    [
        *BOMBS.values(),
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # place 2**31 of the memo: an array of 32 GB
        b"\x80\x02Np2147483000\n.",
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",  # a byte array of 1 TB
        b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b".",
        b"\x80\x04X\xff\xff\xff\x7f.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"(" * 100_000,
        b"\x80\x04" + b"]" * 100_000 + b".",
        b"\x80\x04" + b"\x85" * 10 + b".",
        b"\x00",
        b"",
        pickle.dumps(bomb(40)),
        pickle.dumps({"storage_data": bomb(40), "state_dict_metadata": {}}),
        pickle.dumps(torch.float32),
    ],
)  # fmt: skip
def test_pickles_that_ask_for_memory(folders: tuple[Path, Path], data: bytes) -> None:
    path = folders[1] / "iter_0000000" / ".metadata"
    with Spoilt(path, data), pytest.raises(DlmBridgeError) as refused:
        read_metadata(path.parent)
    assert len(str(refused.value)) < 500


def unpickled(data: bytes) -> Any:
    return RestrictedUnpickler(data, "a pickle", re.compile("nothing")).load()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_sound_pickles_pass(protocol: int) -> None:
    value = [1, 2**40, -(2**90), 1.5, True, None, "é" * 300, b"\0" * 300, bytearray(5), {"a": (1, 2, 3, 4)}, {1}, {2}]
    value = [value, value, frozenset("ab"), [str(i) for i in range(700)], OrderedDict(a=1), {(1, 2): 2**70}]
    assert unpickled(pickle.dumps(value, protocol)) == value


@FUZZ
@given(data=st.binary(max_size=200))
def test_any_pickle_ends(data: bytes) -> None:
    """Any bytes are refused or read, at once."""
    with contextlib.suppress(Exception):
        unpickled(data)


@FUZZ
@given(edits=EDITS, with_values=st.booleans())
def test_items(folders: tuple[Path, Path], edits: list[tuple[float, bytes, int]], with_values: bool) -> None:
    path = folders[1].parent / "item"
    data = edited(object_item(torch.arange(12.0).view(3, 4) if with_values else torch.zeros(0)), edits)
    path.write_bytes(data)

    def read() -> int:
        item = open_tensor_item(path, 0, len(data), "a")
        values = torch.empty(item.shape, dtype=item.dtype)
        read_item_rows(item, (0,) * values.dim(), values.numel(), raw_bytes(values))
        return values.nbytes

    nbytes = refused_or(read)
    assert nbytes is None or nbytes <= len(data)


@FUZZ
@given(edits=EDITS)
def test_common(folders: tuple[Path, Path], edits: list[tuple[float, bytes, int]]) -> None:
    path = folders[1] / "iter_0000000" / "common.pt"
    with Spoilt(path, edited(path.read_bytes(), edits)):
        refused_or(lambda: TorchDistReader(path.parent))


@FUZZ
@given(edits=EDITS, file=st.sampled_from(["dlm_bridge.json", "hf/config.json", "iter_0000000/metadata.json",
                                          "latest_checkpointed_iteration.txt"]))  # fmt: skip
def test_json(folders: tuple[Path, Path], edits: list[tuple[float, bytes, int]], file: str) -> None:
    path = folders[1] / file
    with Spoilt(path, edited(path.read_bytes(), edits)):
        refused_or(partial(open_whole, folders[1]))
