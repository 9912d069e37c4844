"""Random damage to a copy of an input: what a bad disk, a broken download or somebody hostile leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.hostile import put_any

Damage = Callable[[Path, Random], str]
HOSTILE = ("\x1b[31mred\x1b[0m", "\ud800", "a\nb", "x" * 100_000, "\x00", "../../etc/passwd", "\u202e", "", "é" * 300)
NUMBERS = (-1, 0, 1, 3, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308)
VALUES: tuple[Any, ...] = (None, True, False, [], {}, [1], {"a": 1}, ["a", None], *NUMBERS, *HOSTILE)
TEMPLATES = (
    "{% for %}", "{{ messages[0].content.nothing.at.all }}", "{{ 1 / 0 }}", "{{ raise_exception('\x1b[2J no') }}",
    "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}", "{{ ''.__class__.__mro__ }}", "{{ 'a' * 10 ** 5 }}",
    "{{ '(' * 5 }}" + "{{" * 500, "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "", "{{ messages }}" * 3,
)  # fmt: skip


def damage(folder: Path, random: Random, weights: str) -> list[str]:
    """Damage one to three files in `folder`, of which `weights` is the pattern of the weight files. Returns a
    description of each damage, `KIND PATH: DETAIL`."""
    if random.random() < 0.1:
        return [f"hostile pickle: {put_any(folder, random)}"]
    return [_damage(folder, random, weights) for _ in range(random.choice((1, 1, 1, 2, 3)))]


def _damage(folder: Path, random: Random, weights: str) -> str:
    files = sorted(path for path in folder.rglob("*") if is_plain(path) and path.suffix not in (".py", ".png"))
    if not files:
        return "nothing is left"
    chosen = [path for path in files if path.match(weights)]
    texts = [path for path in files if path.suffix in (".json", ".jsonl", ".jinja", ".yaml")]
    pool = random.choice([files, chosen or files, texts or files])
    path = random.choice(pool)
    kinds: list[Damage] = [flip, truncate, splice, zeros, remove, replace]
    if path.suffix in (".json", ".yaml"):
        kinds += [mutate_json] * 6
    if path.suffix == ".jsonl":
        kinds += [mutate_line] * 4
    if path.suffix == ".safetensors":
        kinds += [mutate_header] * 3
    if path.suffix == ".jinja":
        kinds += [mutate_template] * 6
    done = random.choice(kinds)
    return f"{done.__name__} {path.relative_to(folder)}: {done(path, random)}"


def is_plain(path: Path) -> bool:
    """Whether a path is a file of the copy itself. The target of a link must not be damaged."""
    return path.is_file() and not path.is_symlink()


def flip(path: Path, random: Random) -> str:
    data = bytearray(path.read_bytes())
    places = [random.randrange(len(data)) for _ in range(random.choice((1, 1, 8)))] if data else []
    for place in places:
        data[place] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    return str(places)


def truncate(path: Path, random: Random) -> str:
    size = path.stat().st_size
    left = random.choice((0, 1, size // 2, max(0, size - 1), random.randrange(size + 1)))
    os.truncate(path, min(left, size))
    return f"{left} of {size} bytes"


def splice(path: Path, random: Random) -> str:
    data = path.read_bytes()
    place, gone = random.randrange(len(data) + 1), random.choice((0, 1, 8, 64))
    new = random.choice((b"", b"\xff" * 8, b"\x00" * 8, b"[" * 100_000, b"\x1b[2J", b'"', random.randbytes(16)))
    path.write_bytes(data[:place] + new + data[place + gone :])
    return f"{gone} bytes at {place} became {new[:16]!r} ({len(new)})"


def zeros(path: Path, random: Random) -> str:
    """Zeros in place of a block, as if it had never been written."""
    data = bytearray(path.read_bytes())
    start = random.randrange(len(data) + 1)
    end = min(len(data), start + random.choice((16, 512, len(data))))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)
    return f"{start} to {end}"


def remove(path: Path, _: Random) -> str:
    path.unlink()
    return ""


def replace(path: Path, random: Random) -> str:
    """Replace the file by a pipe, a folder, a device or a link that leads nowhere."""
    path.unlink()
    what = random.choice(
        ("pipe", "folder", "nowhere", "itself", "/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem")
    )
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to({"nowhere": "does-not-exist", "itself": path.name}.get(what, what))
    return what


def mutate_json(path: Path, random: Random) -> str:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        return "no JSON any more"
    change = "all"
    nodes = list(_nodes(value))
    if nodes and random.random() < 0.9:
        # Half of the time near the root, where the keys are that all readers look at.
        node, key = random.choice(
            [each for each in nodes if each[0] is value] or nodes if random.random() < 0.5 else nodes
        )
        change = f"{key!r} = {_mutate(node, key, random)}"
    else:
        value = random.choice(VALUES)
    text = json.dumps(value)
    if random.random() < 0.1:
        depth = random.choice((200, 900, 5000, 200_000))
        text, change = text[:-1] + ', "deep": ' + "[" * depth + "]" * depth + text[-1:], f"nested {depth}"
    path.write_text(text, "utf-8", errors="surrogatepass")
    return change


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *_nodes(inner)]
    return found


def _mutate(node: Any, key: Any, random: Random) -> str:
    chance = random.random()
    if chance < 0.15:
        del node[key]
        return "removed"
    if chance < 0.25 and isinstance(node, dict):
        name = random.choice(HOSTILE)
        node[name] = node.pop(key)
        return f"renamed {name[:20]!r}"
    if chance < 0.4 and isinstance(node[key], int | float):
        node[key] = random.choice((node[key] + 1, node[key] * 2, -node[key], str(node[key]), float(node[key])))
    elif key == "chat_template":
        node[key] = random.choice(TEMPLATES)
    else:
        node[key] = random.choice(VALUES)
    return repr(node[key])[:40]


def mutate_line(path: Path, random: Random) -> str:
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        return "no lines"
    place = random.randrange(len(lines))
    try:
        row = json.loads(lines[place])
    except (ValueError, RecursionError):
        return "no JSON any more"
    nodes = _nodes(row)
    change = "all"
    if nodes:
        node, key = random.choice(nodes)
        change = f"line {place}: {key!r} = {_mutate(node, key, random)}"
    lines[place] = json.dumps(row).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    return change


def mutate_header(path: Path, random: Random) -> str:
    """Another header over the same tensors."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        name = random.choice([key for key in header if key != "__metadata__"])
    except (ValueError, RecursionError, IndexError):
        return "no header any more"
    entry, what = header[name], random.choice(("name", "name", "shape", "dtype", "offsets", "any", "metadata"))
    if what == "name":
        header[random.choice(HOSTILE)] = header.pop(name)
    elif what == "shape" and isinstance(entry, dict):
        entry["shape"] = random.choice(([], list(reversed(entry["shape"])), [2**40], [-1], [prod(entry["shape"])]))
    elif what == "dtype" and isinstance(entry, dict):
        entry["dtype"] = random.choice(("I32", "F32", "BF16", "F8_E4M3", "U8", "F64", "", 3))
    elif what == "offsets" and isinstance(entry, dict):
        entry["data_offsets"] = random.choice(([0, 0], [0, 2**62], [8, 4], ["a", None], []))
    elif what == "metadata":
        header["__metadata__"] = random.choice(VALUES)
    else:
        header[name] = random.choice(VALUES)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"{what} of {name}"


def mutate_template(path: Path, random: Random) -> str:
    template = random.choice(TEMPLATES)
    path.write_text(template)
    return template[:40]
