"""Upload of a checkpoint folder to the Hub in one commit, with a generated model card. Tokens are never printed."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dlm_bridge.convert.checkpoints.huggingface import HubCheckpoint
from dlm_bridge.convert.formats.safetensors_file import read_header
from dlm_bridge.convert.lora.peft import ADAPTER_WEIGHTS, changed_weights, is_peft_folder
from dlm_bridge.convert.manifest import MANIFEST, ChangedTensorsError, Manifest, read_manifest
from dlm_bridge.convert.side_files import list_side_files
from dlm_bridge.convert.verify import check_recorded
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.hub import ADAPTER_CONFIG, HUB_ID, checkpoint_folder, inside, read_config
from dlm_bridge.models.families import families
from dlm_bridge.models.family_spec import FamilySpec

CARD = "README.md"
_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{6,}|(?i:bearer)\s+\S+|(?<=://)[^/@\s]+(?=@)")
_TRAINING = (
    "objective", "engine", "steps", "global_batch_size", "seq_length", "lr", "lr_schedule", "warmup_steps",
    "weight_decay", "precision", "seed",
)  # fmt: skip
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\s*(?:\r?\n|\Z)", re.DOTALL)


@dataclass
class PushReport:
    """What was uploaded, or would be. `card`: "kept" the folder's own, or "generated"."""

    folder: str
    repo_id: str
    revision: str
    private: bool
    files: dict[str, int]
    bytes: int
    card: str
    left_out: list[str] = field(default_factory=list)
    dry_run: bool = False
    card_text: str | None = None  # of a dry run that would generate one
    commit: str | None = None  # its address

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    overwrite_card: bool = False,
    dry_run: bool = False,
    accept_changed_tensors: bool = False,
) -> PushReport:
    """Upload a Hub folder or a PEFT adapter folder to `repo_id`, which is created where it does not exist.

    Everything that belongs to the checkpoint goes up in one commit: all of it is there then, or nothing. Raises
    DlmBridgeError, in one line without the token, for a folder that is no whole checkpoint and for what the Hub
    refuses; ChangedTensorsError for weights that are not as recorded, unless that is accepted.
    """
    if not HUB_ID.fullmatch(repo_id):
        raise DlmBridgeError(f"{repo_id}: is not a Hub id (owner/name)")
    if not folder.is_dir():
        raise DlmBridgeError(f"{folder}: no such folder")
    folder = checkpoint_folder(folder)
    files, left_out, card = _contents(folder, repo_id, overwrite_card, accept_changed_tensors)
    sizes = {name: inside(folder, name).stat().st_size for name in files}
    if card is not None:
        sizes[CARD] = len(card.encode())
    report = PushReport(
        folder=str(folder),
        repo_id=repo_id,
        revision=revision or "main",
        private=private,
        files=dict(sorted(sizes.items())),
        bytes=sum(sizes.values()),
        card="kept" if card is None else "generated",
        left_out=left_out,
        dry_run=dry_run,
        card_text=card if dry_run else None,
    )
    if not dry_run:
        report.commit = _upload(
            folder, files, card, report, message or f"Upload {folder.resolve().name} with dlm-bridge"
        )
    return report


def without_tokens(text: str) -> str:
    """`text` with everything that is or looks like a Hub token replaced by "***"."""
    for secret in _known_tokens():
        text = text.replace(secret, "***")
    return _TOKEN.sub("***", text)


def _contents(
    folder: Path, repo_id: str, overwrite_card: bool, accept_changed: bool
) -> tuple[list[str], list[str], str | None]:
    """The files to upload, those left out, and the card's text where one is generated. Raises DlmBridgeError."""
    manifest = read_manifest(folder)
    if is_peft_folder(folder):
        adapter = read_config(folder / ADAPTER_CONFIG)
        read_header(inside(folder, ADAPTER_WEIGHTS))
        if not accept_changed and (changed := changed_weights(folder)):
            raise ChangedTensorsError(str(folder), map(str, changed))
        side = list_side_files(folder, {ADAPTER_WEIGHTS})
        files, left_out, family = [ADAPTER_WEIGHTS, *side.kept], list(side.excluded), _base_family(adapter)
    else:
        if not (folder / "config.json").is_file():
            raise DlmBridgeError(
                f"{folder}: is neither a Hub checkpoint (config.json) nor a PEFT adapter (adapter_config.json): "
                "export a Megatron checkpoint first"
            )
        checkpoint = HubCheckpoint(folder, manifest.family if manifest else None)
        checkpoint.check()
        if not accept_changed:
            check_recorded(checkpoint)
        adapter = None
        family = checkpoint.family
        files = sorted({*checkpoint.reader.files, *checkpoint.hub.files})
        left_out = list(checkpoint.hub.excluded)
    files = [name for name in files if not Path(name).name.startswith(".")]
    if (folder / MANIFEST).is_file():
        files.append(MANIFEST)
    if CARD in files and not overwrite_card:
        return files, left_out, None
    return [name for name in files if name != CARD], left_out, model_card(folder, repo_id, family, manifest, adapter)


def _upload(folder: Path, files: list[str], card: str | None, report: PushReport, message: str) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi

    operations = [CommitOperationAdd(name, str(inside(folder, name).resolve())) for name in files]
    if card is not None:
        operations.append(CommitOperationAdd(CARD, card.encode()))
    try:
        api = HfApi(library_name="dlm-bridge")
        api.create_repo(report.repo_id, private=report.private, exist_ok=True)
        if report.revision != "main":
            api.create_branch(report.repo_id, branch=report.revision, exist_ok=True)
        info = api.create_commit(report.repo_id, operations, commit_message=message, revision=report.revision)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted: nothing was committed to {report.repo_id}") from None
    except Exception as error:  # whatever the network or the Hub says, it is one line for the user, and no traceback
        raise DlmBridgeError(_said(report.repo_id, error)) from None
    return without_tokens(str(info.commit_url))


def _said(repo_id: str, error: Exception) -> str:
    """What went wrong and the remedy, without a token."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    detail = without_tokens(one_line(error))[:300]
    if status == 401 or type(error).__name__ == "LocalTokenNotFoundError":
        return f"{repo_id}: the Hub knows no valid token of yours (401): run `hf auth login` or set HF_TOKEN"
    if status == 403:
        return f"{repo_id}: your token may not write there (403): use one with write access to it ({detail})"
    if status == 404:
        return f"{repo_id}: does not exist on the Hub, or your token may not see it (404): check owner and name"
    if status is not None:
        return f"{repo_id}: the Hub refused the upload ({status}): {detail}"
    # huggingface_hub's HTTP client, whichever it is, has its network errors under this name.
    network = isinstance(error, OSError) or any(base.__name__ == "TransportError" for base in type(error).__mro__)
    failed = "the Hub was not reached" if network else "the upload failed"
    return f"{repo_id}: {failed}: {type(error).__name__}: {detail}"


def _known_tokens() -> list[str]:
    from huggingface_hub import get_token

    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")
    found = [get_token(), *(os.environ.get(name) for name in names)]
    return [token for token in found if token]


def model_card(
    folder: Path,
    repo_id: str,
    family: FamilySpec | None,
    manifest: Manifest | None,
    adapter: dict[str, Any] | None = None,
) -> str:
    """README.md's text. `adapter` is an adapter_config.json, whose folder this then is."""
    from huggingface_hub import ModelCard, ModelCardData

    run = training_run(folder)
    base = _base_model(manifest, run, adapter)
    old = front_matter(folder / "README.md")
    tags = ["dlm-bridge"]
    if family is not None:
        tags.append(family.name)
        if family.kind == "diffusion":
            tags.append("diffusion-language-model")
    data = ModelCardData(
        license=_license(old, base, family),
        language=old.get("language"),
        library_name="peft" if adapter is not None else "transformers",
        pipeline_tag="text-generation",
        base_model=base,
        tags=tags + (["lora"] if adapter is not None else []),
    )
    parts = [f"# {repo_id.rpartition('/')[2]}", _what(family, base, adapter)]
    if manifest is not None:
        parts.append(_converted(manifest))
    if run is not None:
        parts.append(_trained(run))
    parts.append(_usage(repo_id, family, base, adapter))
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


def training_run(folder: Path) -> dict[str, Any] | None:
    """`config` and the last row of `metrics` of the run that a checkpoint folder belongs to."""
    for place in (folder, folder.parent.parent if folder.parent.name == "checkpoints" else folder):
        config = _yaml(place / "config.yaml")
        if config:
            return {"config": _flat(config), "metrics": _last_row(place / "metrics.jsonl", _step(folder))}
    return None


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """A run's options without their sections, which runs of earlier versions do not have."""
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
        value = yaml.safe_load(match[1]) if match else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _base_model(manifest: Manifest | None, run: dict[str, Any] | None, adapter: dict[str, Any] | None) -> str | None:
    """The Hub id that it was made of; a local path means nothing to a reader."""
    candidates = [
        (adapter or {}).get("base_model_name_or_path"),
        (run or {}).get("config", {}).get("model"),
        manifest.source.get("name") if manifest else None,
    ]
    found = (name for name in candidates if isinstance(name, str) and HUB_ID.fullmatch(name))
    return next(found, None)


def _base_family(adapter: dict[str, Any]) -> FamilySpec | None:
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
    name = source.get("name")
    origin = f" from {name}" if isinstance(name, str) and HUB_ID.fullmatch(name) else ""
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


def _usage(repo_id: str, family: FamilySpec | None, base: str | None, adapter: dict[str, Any] | None) -> str:
    own = family is not None and family.kind == "diffusion"
    lines = ["import dlm_bridge  # registers the model with transformers"] if own else []
    if adapter is not None:
        lines += [
            "from peft import AutoPeftModelForCausalLM",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{repo_id}")',
        ]
    else:
        imported, name = ["from transformers import AutoModelForCausalLM, AutoTokenizer"], "AutoModelForCausalLM"
        if family is not None and family.sampled_here and not family.auto_classes:
            # The Auto classes take it for another model.
            module, _, name = family.model_class.partition(":")
            imported = ["from transformers import AutoTokenizer", "", f"from {module} import {name}"]
        lines += [
            *imported,
            "",
            f'model = {name}.from_pretrained("{repo_id}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")',
        ]
    code = "\n".join(lines)
    install = "`pip install dlm-bridge`, then:\n\n" if own else ""
    return f"## Use\n\n{install}```python\n{code}\n```"


def _yaml(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
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
