"""The page and figure of quality.py, computed from its results."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

COLOURS = {"autoregressive": "tab:orange", "diffusion": "tab:blue"}
TITLES = {"stories": "Stories of a known entropy", "python": "Python's standard library"}


def machine() -> dict[str, str]:
    """Return the device and the versions of Python, torch and transformers."""
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
        axes.set(xlabel="training tokens, millions", ylabel="nats per token", title=TITLES[text], yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    figure.savefig(folder / "quality.png")


def page(results: dict[str, Any]) -> str:
    """Return docs/quality.md."""
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
    """Return the table of held-out losses: one line per model, then the text's entropy if it is known."""
    lines = [
        "| | held out, nats per token | bits per byte | above the text's entropy "
        "| training tokens | tokens/s | seconds |",
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
    """Return the table of samples: the fraction that the stories' program could have written."""
    lines = [
        "| model | sampling | whole stories | parsed before the first error | ended | seconds |",
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
    """Return the first sample of each model's first two sampling methods."""
    blocks = []
    for kind, model in found["models"].items():
        for way in model["samples"][:2]:
            fence = "```" if "```" not in way["text"] else "~~~~"
            blocks.append(f"{kind}, {way['name']}:\n\n{fence}text\n{way['text'].rstrip()}\n{fence}")
    return "\n\n".join(blocks)


INTRODUCTION = """# Quality

This command writes the page, its figure and all its numbers:

```
python scripts/quality.py --preset {preset} --output quality
```

Machine: {device}; Python {python}, torch {torch}, transformers {transformers}; {seconds:.0f} s in total.

`dlm-bridge pretrain --from-scratch` trains two models of {parameters} parameters with the same architecture (Qwen3:
{layers} layers, hidden size {hidden}). One has causal attention (`Qwen3ForCausalLM`), the other bidirectional
attention (`A2DQwen3LMHeadModel`). Both start from the same initial weights, which depend only on the seed and the
tensors' names, and train on the same {batch} rows of {seq_length} tokens in every step, with the same learning rate
schedule. Only the objective differs: next-token prediction or masked diffusion.

Held-out documents are in neither model's training data. The autoregressive loss is exact. For the diffusion model,
only an upper bound of the loss can be computed: the mean over {samples} draws per row of (N / n) x the cross-entropy
at n of its N tokens masked, with n uniform on 1..N. Both models are given the first token of a row, an end-of-text
token. The diffusion model is also given the row's length. ± is one standard error over the rows.

![validation against tokens](quality.png)

Faint lines are the losses of the training steps. Dots are validation losses, with the same noise each time.
Validation blocks may begin and end anywhere in a document, so these losses differ slightly from the tables."""

ABOUT = {
    "stories": """`scripts/quality_stories.py` generates stories: small facts are introduced, changed and asked for
again (sums of fruit, the location of a tool, the order of a list). Every random choice of the program has a known
probability and can be recovered from the text. The entropy of the text is therefore known, and no model can have a
lower loss; the loss above the entropy measures what the model has not learnt. Training data: {documents:,} stories
({bytes:,} bytes), each used once. Held out: {held_out[rows]} rows of whole stories from another seed,
{held_out[tokens]:,} tokens; {held_out[left_out]:.1%} of the stories drawn for them were longer than a row and
omitted.""",
    "python": """The sources of the Python interpreter that ran the script, Python {python} ({documents:,} files,
{bytes:,} bytes, without tests and held-out files; SHA-256 of all of them {sha256}). Both models train on them for
several epochs. Held out: {held_out[rows]} rows, {held_out[tokens]:,} tokens, from one file in sixteen. The entropy
is not known.""",
}

SAMPLES = """The same program parses the models' samples, drawn at temperature 1 after an end-of-text token. "Parsed
before the first error" is the mean fraction of a sample's characters before it leaves the grammar of the stories:"""
