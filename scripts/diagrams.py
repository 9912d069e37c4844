"""The documentation's diagrams, drawn from the package's own masks and mapping: `python scripts/diagrams.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import torch

from dlm_bridge.attention.masks import MaskDescriptor
from dlm_bridge.mapping.rules import QKV, Dims

IMAGES = Path(__file__).parents[1] / "docs/images"
INK, FAINT, LINE = "#1b1f24", "#6b7280", "#d5dae0"
COLOURS = ("#3f51b5", "#e6862a", "#2e9e6b", "#c2486f", "#7a6ff0", "#8a929b")
FONT = 'font-family="system-ui,sans-serif"'


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for draw in (attention_patterns, two_streams, fused_qkv, cached_columns):
        (IMAGES / f"{draw.__name__}.svg").write_text(draw())


def attention_patterns() -> str:
    """The masks of eight positions: who attends to whom."""
    documents, positions = torch.zeros((1, 8), dtype=torch.int32), torch.arange(8)[None]
    masks = {
        "bidirectional": MaskDescriptor.bidirectional(documents),
        "block-causal, blocks of 4": MaskDescriptor.block_causal(documents, positions, 4),
        "causal": MaskDescriptor.causal(documents),
    }
    parts = [
        grid(20 + 250 * place, 40, mask.dense()[0, 0], title, cell=24, colour=lambda q, k: COLOURS[0])
        for place, (title, mask) in enumerate(masks.items())
    ]
    parts.append(text(20, 258, "rows: queries; columns: keys; filled: the query attends to the key", FAINT, 13))
    return picture(760, 275, parts)


def two_streams() -> str:
    """The training mask of a block-causal model: a noisy and a clean copy of the row."""
    documents, positions = torch.zeros((1, 8), dtype=torch.int32), torch.arange(8)[None]
    mask = MaskDescriptor.two_streams(documents, positions, 4).dense()[0, 0]
    colours = {(True, True): COLOURS[1], (True, False): COLOURS[0], (False, False): COLOURS[2]}
    parts = [
        text(120, 22, "keys: noisy", INK, 14),
        text(312, 22, "keys: clean", INK, 14),
        text(8, 130, "queries:", INK, 14),
        text(8, 148, "noisy", INK, 14),
        text(8, 322, "queries:", INK, 14),
        text(8, 340, "clean", INK, 14),
        grid(80, 34, mask, "", cell=24, colour=lambda q, k: colours[q < 8, k < 8]),
    ]
    for place, (colour, words) in enumerate(
        (
            (COLOURS[1], "a noisy block attends to itself"),
            (COLOURS[0], "and to the clean blocks before it;"),
            (COLOURS[2], "clean blocks attend to clean blocks up to their own"),
        )
    ):
        parts.append(box(490, 120 + 28 * place, 16, 16, colour))
        parts.append(text(514, 133 + 28 * place, words, INK, 14))
    return picture(880, 440, parts)


def fused_qkv() -> str:
    """Query, key and value rows of the Hub in Megatron's fused tensor, cut over two tensor parallel ranks."""
    dims = Dims(layers=1, hidden=1, heads=4, groups=2, head_dim=1, ffn=1, vocab=1)
    rule = QKV("fused", q="q", k="k", v="v")
    names = ["q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1"]
    sources = torch.arange(8.0).view(8, 1).split([4, 2, 2])
    fused = [int(row) for row in rule.to_megatron(sources, dims).flatten()]
    colour = {name: COLOURS["qkv".index(name[0])] for name in names}
    parts = [text(20, 24, "Hub: q_proj, k_proj, v_proj", INK, 14), text(20, 148, "Megatron: linear_qkv", INK, 14)]
    places = {}
    x = 20
    for place, name in enumerate(names):
        x += 24 if place in (4, 6) else 0
        places[place] = x
        parts += [box(x, 36, 56, 30, colour[name]), text(x + 18, 56, name, "#ffffff", 14)]
        x += 60
    x = 20
    for rank in range(2):
        begin = x
        for row in fused[4 * rank : 4 * rank + 4]:
            name = names[row]
            parts.append(f'<path d="M{places[row] + 28} 66 L{x + 28} 158" stroke="{LINE}" fill="none"/>')
            parts += [box(x, 158, 56, 30, colour[name]), text(x + 18, 178, name, "#ffffff", 14)]
            x += 60
        parts.append(text(begin, 208, f"query group {rank}: tensor parallel rank {rank} of 2", FAINT, 13))
        x += 48
    return picture(600, 224, parts)


def cached_columns() -> str:
    """Which columns a forward pass runs, for each kind of KV cache."""
    rows = (
        ("none", (1, 1, 1, 1), "every step runs everything"),
        ("prefix", (0, 0, 1, 1), "the block and what follows it; what is before is read"),
        ("dual", (0, 0, 1, 0), "the block alone; both sides are read, as of its first step"),
        ("block", (0, 0, 1, None), "block-causal: nothing lies behind the block; exact"),
    )
    headings = ("prompt", "committed", "the block", "later blocks")
    widths = (120, 120, 100, 140)
    parts: list[str] = []
    x = 90
    for heading, width in zip(headings, widths, strict=True):
        parts.append(text(x + 6, 24, heading, INK, 13))
        x += width
    for place, (name, runs, words) in enumerate(rows):
        y = 36 + 50 * place
        parts += [text(20, y + 20, name, INK, 14)]
        x = 90
        for run, width in zip(runs, widths, strict=True):
            if run is not None:
                parts.append(box(x, y, width - 4, 28, COLOURS[0] if run else LINE))
            x += width
        parts.append(text(x + 10, y + 19, words, FAINT, 13))
    parts += [box(90, 240, 16, 16, COLOURS[0]), text(114, 253, "run in a step", INK, 13)]
    parts += [box(230, 240, 16, 16, LINE), text(254, 253, "read from the cache", INK, 13)]
    return picture(970, 270, parts)


def grid(x: int, y: int, mask: torch.Tensor, title: str, cell: int, colour: Callable[[int, int], str]) -> str:
    parts = [text(x, y - 12, title, INK, 14)] if title else []
    for query, row in enumerate(mask.tolist()):
        for key, attends in enumerate(row):
            fill = colour(query, key) if attends else "#f3f4f6"
            parts.append(box(x + cell * key, y + cell * query, cell - 2, cell - 2, fill))
    return "\n".join(parts)


def box(x: int, y: int, width: int, height: int, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{colour}"/>'


def text(x: int, y: int, words: str, colour: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" {FONT} font-size="{size}" fill="{colour}">{escape(words)}</text>'


def picture(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    paper = f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, paper, *parts, "</svg>", ""])


if __name__ == "__main__":
    main()
