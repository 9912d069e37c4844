"""What quality.py found, as a page with its figure: everything on it is computed from the results."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

COLOURS = {"autoregressive": "tab:orange", "diffusion": "tab:blue"}
TITLES = {"stories": "Stories of a known entropy", "python": "Python's standard library"}


def machine() -> dict[str, str]:
    """Where the results are from."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores, no GPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"device": device, "python": platform.python_version(), **versions}


def draw_curves(results: dict[str, Any], folder: Path) -> None:
    """Write quality.png: validation against tokens of both models, a panel for each text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    texts = results["texts"]
    figure = Figure(figsize=(6.5 * len(texts), 4.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (text, found) in zip(figure.subplots(1, len(texts), squeeze=False)[0], texts.items(), strict=True):
        for kind, model in found["models"].items():
            measured = [(tokens / 1e6, value) for tokens, _, value in model["curve"] if value is not None]
            losses = [(tokens / 1e6, loss) for tokens, loss, _ in model["curve"]]
            axes.plot(*zip(*losses, strict=True), linewidth=0.4, alpha=0.35, color=COLOURS[kind])
            name = "diffusion, bound" if kind == "diffusion" else "autoregressive, loss"
            axes.plot(*zip(*measured, strict=True), "o-", markersize=3, label=name, color=COLOURS[kind])
        if "truth" in found:
            axes.axhline(found["truth"]["nats_per_token"], linestyle="--", color="black", label="entropy of the text")
        axes.set(xlabel="million tokens trained on", ylabel="nats a token", title=TITLES[text], yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    figure.savefig(folder / "quality.png")


def page(results: dict[str, Any]) -> str:
    """The whole of docs/quality.md."""
    sizes, where = results["sizes"], results["machine"]
    parameters = next(iter(results["texts"].values()))["models"]["diffusion"]["parameters"]
    parts = [
        INTRODUCTION.format(
            preset=results["preset"],
            seconds=results["seconds"],
            **where,
            parameters=f"{parameters / 1e6:.1f} M" if parameters > 1e6 else f"{parameters:,}",
            layers=sizes["layers"],
            hidden=sizes["hidden"],
            batch=sizes["global_batch_size"],
            seq_length=sizes["seq_length"],
            samples=sizes["bound_samples"],
        )
    ]
    for text, found in results["texts"].items():
        parts += [f"## {TITLES[text]}", ABOUT[text].format(**found["corpus"], held_out=found["held_out"])]
        parts.append(loss_table(found))
        if text == "stories":
            parts += [SAMPLES, sample_table(found)]
        parts += [f"### What they write\n\n{examples(found)}"]
    return "\n\n".join(parts) + "\n"


def loss_table(found: dict[str, Any]) -> str:
    """The held-out figures, a line for each model, the truth last where it is known."""
    lines = [
        "| | held out, nats a token | bits a byte | above the text's entropy | training tokens | tokens/s | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    names = {"autoregressive": "autoregressive (exact loss)", "diffusion": "diffusion (upper bound)"}
    for kind, model in found["models"].items():
        above = f"{model['above_truth']:.4f} ± {model['above_truth_error']:.4f}" if "above_truth" in model else ""
        lines.append(
            f"| {names[kind]} | {model['nats_per_token']:.4f} ± {model['standard_error']:.4f} "
            f"| {model['bits_per_byte']:.4f} | {above} | {model['training_tokens'] / 1e6:.1f} M "
            f"| {model['tokens_per_s'] / 1e3:,.0f}k | {model['seconds']:.0f} |"
        )
    if "truth" in found:
        truth = found["truth"]
        lines.append(
            f"| the stories' own program | {truth['nats_per_token']:.4f} ± {truth['standard_error']:.4f} "
            f"| {truth['bits_per_byte']:.4f} | 0 | | | |"
        )
    return "\n".join(lines)


def sample_table(found: dict[str, Any]) -> str:
    """How much of what the models write the stories' program could have written."""
    lines = [
        "| model | sampling | stories from beginning to end | read before the first slip | ended | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for kind, model in found["models"].items():
        lines += [
            f"| {kind} | {way['name']} | {way['whole_stories']:.0%} | {way['understood']:.0%} | {way['ended']:.0%} "
            f"| {way['seconds']:.1f} |"
            for way in model["samples"]
        ]
    return "\n".join(lines)


def examples(found: dict[str, Any]) -> str:
    """The first text of each model's first two ways of sampling, as it came."""
    blocks = []
    for kind, model in found["models"].items():
        for way in model["samples"][:2]:
            fence = "```" if "```" not in way["text"] else "~~~~"
            blocks.append(f"{kind}, {way['name']}:\n\n{fence}text\n{way['text'].rstrip()}\n{fence}")
    return "\n\n".join(blocks)


INTRODUCTION = """# Quality: a diffusion model beside its autoregressive twin

One command makes this page, its figure and every number on it:

```
python scripts/quality.py --preset {preset} --output quality
```

Here: {device}; Python {python}, torch {torch}, transformers {transformers}; {seconds:.0f} s in all.

Two models of {parameters} parameters on the same body (Qwen3's: {layers} layers of {hidden}), causal
(`Qwen3ForCausalLM`) and bidirectional (`A2DQwen3LMHeadModel`), are trained by `dlm-bridge pretrain --from-scratch`:
the same initial weights (they depend on the seed and the tensors' names alone), the same {batch} rows of {seq_length}
tokens in every step, the same schedule. What differs is the objective: the next token, or masked diffusion.

Held out is text of which neither model saw a document. The autoregressive loss is exact. Of a diffusion model only an
upper bound on it can be computed: the mean over {samples} draws for each row of (N / n) x the cross-entropy at n of
its N tokens masked, n uniform on 1..N. The first token of a row, an end of text, is given to both; the diffusion model
is told the row's length as well. ± is one standard error over the rows.

![validation against tokens](quality.png)

Faint lines are the training steps' own losses; dots are validation on blocks cut anywhere, with the same noise each
time, which is why they differ a little from the tables."""

ABOUT = {
    "stories": """`scripts/quality_stories.py` writes them: small facts are introduced, changed and asked for again
(sums of fruit, where a tool lies, the order of a list). Its every choice has a known probability and leaves its mark
in the text, so that the text's entropy is known and no model can have a lower loss: what is above it is what the model
has not learnt. Trained on {documents:,} stories ({bytes:,} bytes), none twice; held out are {held_out[rows]} rows of
whole stories from another seed, {held_out[tokens]:,} tokens; {held_out[left_out]:.1%} of the stories drawn for them
were longer than a row and left out.""",
    "python": """The sources of the interpreter that ran this, Python {python} ({documents:,} files, {bytes:,} bytes
without tests and the files held out; SHA-256 of all of it {sha256}): read several times over by
both models. Held out is one file in sixteen, of it {held_out[rows]} rows, {held_out[tokens]:,} tokens. Its entropy
is not known.""",
}

SAMPLES = """The same program reads what the models write, from an end of text on, at temperature 1, and says how far
it could have written that itself:"""
