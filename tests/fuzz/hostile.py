"""Hostile pickles: one that runs code, and small ones that take very long or much memory.

They lie wherever bytes of a folder can: in place of a file, as the pickle in an archive of `torch.save`, as
`.metadata`, in the items inside `.distcp` files, in the schema of an Arrow file. Digests are made anew, as somebody
hostile would.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

MARKER = "ran"  # beside the folder: what the code makes
METADATA = ".metadata"
CODE = "code"
WHOLE = "whole"  # a place: a file from its start to its end


@dataclass(frozen=True)
class Place:
    """Where bytes lie: a file of a folder, and what of it."""

    file: str
    what: str  # WHOLE, archive, metadata, bytes, tensor, schema


Spoil = Callable[[bytes], bytes]  # a pickle -> what is in its place


def spoiler(name: str, folder: Path) -> Spoil:
    """Replaces a pickle in `folder` by a bomb of this name; or `CODE`: makes the marker before it is what it was, so
    that a reader which runs the code goes on."""
    if name != CODE:
        return lambda _: BOMBS[name]
    code = b"cposix\nmkdir\n(V" + str(folder.parent / MARKER).encode("raw-unicode-escape") + b"\ntR0"
    return lambda data: code + data


def nested(opcodes: bytes) -> bytes:
    """60 containers made by `opcodes`, each of which has the one before where "<" is."""
    made = b")q\x000"
    for number in range(60):
        made += opcodes.replace(b"<", b"h" + bytes([number])) + b"q" + bytes([number + 1]) + b"0"
    return made + b"h" + bytes([60])


TUPLES, DICTS = nested(b"<<\x86"), nested(b"}(K\x00<K\x01<u")
# Small pickles that take for ever, or many GB.
BOMBS = {
    "tuples as a key": b"\x80\x02}" + TUPLES + b"Ns.",
    "tuples in a set": b"\x80\x04\x8f(" + TUPLES + b"\x90.",
    "tuples in a frozenset": b"\x80\x02c__builtin__\nfrozenset\n(" + TUPLES + b"l\x85R.",
    "dictionaries": b"\x80\x02" + DICTS + b".",
    "dictionaries of state": b"\x80\x02}X\x05\x00\x00\x00model" + DICTS + b"s.",
    "a dictionary in itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "a byte array of 8 GB": b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R.",
    "a byte array of 1 TB": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "a memo of 32 GB": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "text that doubles": b"\x80\x02" + b"c_codecs\nencode\n" * 40 + b"C\x01a" + b"X\x03\x00\x00\x00hex\x86R" * 40
    + b".",
    "copies": b"\x80\x02ctorch\nSize\nq\x00((" + b"K\x01" * 20_000 + b"lq\x01" + b"h\x00h\x01\x85R" * 20_000 + b"l.",
}  # fmt: skip


def places(folder: Path) -> Iterator[Place]:
    """Every place in the files of `folder`."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        file = path.relative_to(folder).as_posix()
        yield Place(file, WHOLE)
        if path.name == METADATA:
            yield Place(file, "metadata")
            found = {"bytes" if index.offset is None else "tensor" for index in _stored(path).storage_data}
            yield from (Place(file, what) for what in sorted(found))
        elif path.suffix in (".pt", ".pth", ".bin") and zipfile.is_zipfile(path):
            yield Place(file, "archive")
        elif path.suffix in (".arrow", ".parquet"):
            yield Place(file, "schema")


def put(folder: Path, place: Place, name: str) -> None:
    """Put `CODE` or one of the `BOMBS` there."""
    path, spoil = folder / place.file, spoiler(name, folder)
    if place.what == WHOLE:
        path.write_bytes(spoil(pickle.dumps({}, 2)))
    elif place.what == "archive":
        path.write_bytes(_archive(path.read_bytes(), spoil))
    elif place.what == "metadata":
        path.write_bytes(spoil(path.read_bytes()))
    elif place.what == "schema":
        _schema(path, spoil(pickle.dumps({}, 2)))
    else:
        _items(path, place.what == "bytes", spoil)
    _digest(path, folder)


def _archive(data: bytes, spoil: Spoil) -> bytes:
    """An archive of torch.save with another pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(made, "w") as other:
        for name in archive.namelist():
            content = archive.read(name)
            other.writestr(name, spoil(content) if name.endswith("/data.pkl") else content)
    return made.getvalue()


def _stored(path: Path) -> Any:
    with path.open("rb") as stream:
        return pickle.load(stream)  # of our own making


def _items(path: Path, of_bytes: bool, spoil: Spoil) -> None:
    """Another pickle in every item of bytes, or of tensors, of a distributed checkpoint."""
    metadata = _stored(path)
    for index, info in metadata.storage_data.items():
        if (index.offset is None) == of_bytes:
            file = path.parent / info.relative_path
            data = file.read_bytes()
            item = _archive(data[info.offset : info.offset + info.length], spoil)
            file.write_bytes(data + item)
            info.offset, info.length = len(data), len(item)
    path.write_bytes(pickle.dumps(metadata))


def _schema(path: Path, data: bytes) -> None:
    """Columns of a type that Arrow used to unpickle."""
    import pyarrow
    from pyarrow import parquet

    if path.suffix == ".parquet":
        table = parquet.read_table(path)
    else:
        table = pyarrow.ipc.open_stream(path.read_bytes()).read_all()
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": data}
    schema = pyarrow.schema([each.with_metadata(extension) for each in table.schema], table.schema.metadata)
    table = pyarrow.Table.from_arrays(table.columns, schema=schema)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table)


def _digest(path: Path, folder: Path) -> None:
    """Write the digests of the files again that lie beside `path` or above it."""
    from dlm_bridge.convert.manifest import FILE_DIGESTS, digests_of, file_names, write_digests

    for parent in path.parents:
        if (parent / FILE_DIGESTS).is_file() and path.name != FILE_DIGESTS:
            write_digests(parent, digests_of(parent, file_names(parent)))
        if parent == folder:
            return


def put_any(folder: Path, random: Random) -> str:
    """Put some hostile pickle at some place of a sound folder."""
    place, name = random.choice(list(places(folder))), random.choice([CODE] * 5 + list(BOMBS))
    put(folder, place, name)
    return f"{name} in {place.what} {place.file}"
