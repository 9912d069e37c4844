"""Model cards: README.md of an exported folder, of an adapter, and of what is pushed to the Hub."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dlm_bridge.convert.manifest import Manifest
from dlm_bridge.files.reading import parse_yaml
from dlm_bridge.hub import HUB_ID, public_name, read_config
from dlm_bridge.models.families import FamilySpec, families

CARD = "README.md"
_LOCAL = "path/or/hub-id"  # in the code of a folder's own card, which may be moved
_PEFT = ("# Model Card for Model ID", "[More Information Needed]")  # in PEFT's template
_TRAINING = (
    "objective", "engine", "steps", "global_batch_size", "seq_length", "lr", "lr_schedule", "warmup_steps",
    "weight_decay", "precision", "seed",
)  # fmt: skip
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\s*(?:\r?\n|\Z)", re.DOTALL)


def folder_card(family: FamilySpec | None, manifest: Manifest | None, adapter: dict[str, Any] | None = None) -> str:
    """README.md of a folder that has none of its own: what it is and how it is loaded. Other arguments as of
    `pushed_card`."""
    title = "LoRA adapter" if adapter is not None else f"{family.title} model" if family is not None else "Model"
    return _card(title, _LOCAL, family, manifest, adapter, None, {})


def pushed_card(
    folder: Path,
    repo_id: str,
    family: FamilySpec | None,
    manifest: Manifest | None,
    adapter: dict[str, Any] | None = None,
) -> str:
    """README.md of a folder on the Hub, with the settings of its training run and the licence of an older README.
    `adapter` is an adapter_config.json, whose folder this then is."""
    old = front_matter(folder / CARD)
    return _card(repo_id.rpartition("/")[2], repo_id, family, manifest, adapter, training_run(folder), old)


def is_generated(
    path: Path, family: FamilySpec | None, manifest: Manifest | None, adapter: dict[str, Any] | None = None
) -> bool:
    """Whether a README says nothing of its owner's: it is the card that `folder_card` gives, or PEFT's template."""
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError):
        return False
    return text == folder_card(family, manifest, adapter) or all(words in text for words in _PEFT)


def _card(
    title: str,
    place: str,
    family: FamilySpec | None,
    manifest: Manifest | None,
    adapter: dict[str, Any] | None,
    run: dict[str, Any] | None,
    old: dict[str, Any],
) -> str:
    """`place` is what the code loads, `old` the metadata of the README that is replaced."""
    base = _base_model(manifest, run, adapter)
    tags = ["dlm-bridge"]
    if family is not None:
        tags.append(family.name)
        if family.kind == "diffusion":
            tags.append("diffusion-language-model")
    data = {
        "license": _license(old, base, family),
        "language": old.get("language"),
        "library_name": "peft" if adapter is not None else "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base,
        "tags": tags + (["lora"] if adapter is not None else []),
    }
    known = {name: value for name, value in data.items() if value is not None}
    parts = [f"# {title}", _what(family, base, adapter)]
    if manifest is not None:
        parts.append(_converted(manifest))
    if run is not None:
        parts.append(_trained(run))
    parts.append(_usage(place, family, base, adapter))
    metadata = yaml.safe_dump(known, sort_keys=False, allow_unicode=True)
    return f"---\n{metadata}---\n\n" + "\n\n".join(parts) + "\n"


def training_run(folder: Path) -> dict[str, Any] | None:
    """`config` and the last row of `metrics` of the run that a checkpoint folder belongs to."""
    for place in (folder, *(parent.parent for parent in (folder, folder.parent) if parent.name == "checkpoints")):
        config = _yaml(place / "config.yaml")
        if config:
            return {"config": _flat(config), "metrics": _last_row(place / "metrics.jsonl", _step(folder))}
    return None


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Options of a run without their sections. Runs of earlier versions have none, or other names of some options."""
    named = {("model", "path"): "model", ("data", "paths"): "data", ("schedule", "name"): "lr_schedule"}
    flat: dict[str, Any] = {}
    for section, options in config.items():
        if not isinstance(options, dict):
            flat[section] = options
            continue
        names = {key: named.get((section, key), section if key == "name" else key) for key in options}
        flat |= {names[key]: value for key, value in options.items()}
    return flat


def front_matter(path: Path) -> dict[str, Any]:
    """A README's metadata, empty where there is none that can be read."""
    try:
        match = _FRONT_MATTER.match(path.read_text("utf-8"))
        value = parse_yaml(match[1]) if match else None
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _base_model(manifest: Manifest | None, run: dict[str, Any] | None, adapter: dict[str, Any] | None) -> str | None:
    """The Hub id that it was made of; a local path means nothing to a reader."""
    candidates = [
        (adapter or {}).get("base_model_name_or_path"),
        (run or {}).get("config", {}).get("model"),
        manifest.source.get("name") if manifest else None,
    ]
    found = (public_name(name) for name in candidates if isinstance(name, str))
    return next((name for name in found if HUB_ID.fullmatch(name)), None)


def base_family(adapter: dict[str, Any]) -> FamilySpec | None:
    """The family of an adapter's base model, by its Hub id or by the local folder's config."""
    base = str(adapter.get("base_model_name_or_path"))
    known = next((family for family in families() if base in family.hub_ids), None)
    config = Path(base) / "config.json"
    if known is None and config.is_file():
        architectures = read_config(config).get("architectures")
        named = architectures if isinstance(architectures, list) else []
        known = next((family for family in families() if {*map(str, named)} & {*family.architectures}), None)
    return known


def _license(old: dict[str, Any], base: str | None, family: FamilySpec | None) -> str | None:
    """That of the README that is replaced, or of the family's public checkpoint that this one was made of."""
    if isinstance(old.get("license"), str):
        return old["license"]
    if base is None or family is None or base not in family.hub_ids:
        return None
    card = resources.files("dlm_bridge.model_cards") / f"{family.name}.md"
    if not card.is_file():
        return None
    with resources.as_file(card) as path:
        found = front_matter(path).get("license")
    return found if isinstance(found, str) else None


def _what(family: FamilySpec | None, base: str | None, adapter: dict[str, Any] | None) -> str:
    kind = {None: "model", "diffusion": "diffusion language model", "autoregressive": "autoregressive language model"}
    what = kind[family.kind if family else None]
    title = f" of the {family.title} family" if family else ""
    origin = f", made from [{base}](https://huggingface.co/{base})" if base else ""
    if adapter is not None:
        sizes = f"rank {adapter.get('r')}, alpha {adapter.get('lora_alpha')}"
        return f"A LoRA adapter ({sizes}){origin.replace('made from', 'for')}."
    article = "An" if what.startswith("auto") else "A"
    return f"{article} {what}{title}{origin}."


def _converted(manifest: Manifest) -> str:
    source = manifest.source
    name = public_name(str(source.get("name")))
    origin = f" from {name}" if HUB_ID.fullmatch(name) else ""
    revision = f" at revision {source['revision']}" if origin and source.get("revision") else ""
    dtype = "" if manifest.dtype == "keep" else f", cast to {manifest.dtype}"
    return (
        f"## Conversion\n\nWritten by {manifest.tool}{origin}{revision}{dtype}. `dlm_bridge.json` has the digest of "
        "every tensor: `dlm-bridge verify` compares."
    )


def _trained(run: dict[str, Any]) -> str:
    rows = [(name.replace("_", " "), run["config"][name]) for name in _TRAINING if run["config"].get(name) is not None]
    metrics = run["metrics"]
    rows += [(f"last {name}", metrics[name]) for name in ("step", "loss", "tokens") if name in metrics]
    lines = [f"| {name} | {value:,} |" if isinstance(value, int) else f"| {name} | {value} |" for name, value in rows]
    return "\n".join(["## Training", "", "| setting | value |", "|---|---|", *lines])


def _usage(place: str, family: FamilySpec | None, base: str | None, adapter: dict[str, Any] | None) -> str:
    own = family is not None and not family.native
    lines = ["import dlm_bridge  # registers the model with transformers"] if own else []
    if adapter is not None:
        lines += [
            "from peft import AutoPeftModelForCausalLM",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{place}")',
        ]
    else:
        imported, name = ["from transformers import AutoModelForCausalLM, AutoTokenizer"], "AutoModelForCausalLM"
        if family is not None and family.kind == "diffusion" and not family.auto_classes:
            # The Auto classes take it for another model, or know no causal model for it.
            module, _, name = family.model_class.partition(":")
            imported = ["from transformers import AutoTokenizer", "", f"from {module} import {name}"]
            if family.native:
                imported = [f"from transformers import AutoTokenizer, {name}"]
        lines += [
            *imported,
            "",
            f'model = {name}.from_pretrained("{place}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{place}")',
        ]
    code = "\n".join(lines)
    install = "`pip install dlm-bridge`, then:\n\n" if own else ""
    return f"## Use\n\n{install}```python\n{code}\n```"


def _yaml(path: Path) -> dict[str, Any]:
    try:
        value = parse_yaml(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _step(folder: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)", folder.name)
    return int(match[1]) if match else None


def _last_row(path: Path, step: int | None) -> dict[str, Any]:
    """The row of `step`, or the last one."""
    found: dict[str, Any] = {}
    try:
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                row = json.loads(line)
                if isinstance(row, dict) and "loss" in row and (step is None or row.get("step", 0) <= step):
                    found = row
    except (OSError, ValueError, RecursionError):
        return found
    return found
