"""Upload of a checkpoint folder to the Hub in one commit, with a generated model card. Tokens are never printed."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlm_bridge.convert.card import CARD, base_family, is_generated, pushed_card, training_run
from dlm_bridge.convert.checkpoints.huggingface import HubCheckpoint, list_side_files
from dlm_bridge.convert.formats.hub_weights import read_header
from dlm_bridge.convert.lora.peft import ADAPTER_WEIGHTS, changed_weights, is_peft_folder
from dlm_bridge.convert.manifest import MANIFEST, read_manifest, renamed_source
from dlm_bridge.convert.verify import check_recorded
from dlm_bridge.errors import ChangedTensorsError, CheckpointError, ResourceError, SettingError, one_line
from dlm_bridge.files.reading import read_json
from dlm_bridge.hub import ADAPTER_CONFIG, HUB_ID, checkpoint_folder, inside, public_name, read_config

# Files of an adapter -> key that names its base, which may be a local path.
_NAMES_A_BASE = {ADAPTER_CONFIG: "base_model_name_or_path", "base.json": "base"}
_TOKEN = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{6,}|(?i:bearer)\s+\S+|(?<=://)[^/@\s]+(?=@)")


@dataclass
class PushReport:
    """Report of an upload or of a dry run. `card`: "kept" (the folder's own) or "generated"."""

    folder: str
    repo_id: str
    revision: str
    private: bool
    files: dict[str, int]
    bytes: int
    card: str
    left_out: list[str] = field(default_factory=list)
    dry_run: bool = False
    card_text: str | None = None  # dry run: the card that would be generated
    commit: str | None = None  # URL of the commit
    renamed: dict[str, str] = field(default_factory=dict)  # file -> public name that replaces the local path in it

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dict of plain values."""
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
    run: Path | None = None,
) -> PushReport:
    """Upload a Hub folder or a PEFT adapter folder in one commit.

    Args:
        folder: Hub checkpoint, PEFT adapter, or a training run, whose newest checkpoint is uploaded.
        repo_id: repository (owner/name), created if it does not exist.
        private: create the repository as private.
        revision: branch to commit to, created if it does not exist; None: main.
        message: commit message.
        overwrite_card: replace the folder's README.md by a generated card.
        dry_run: check everything and return the report; upload nothing.
        accept_changed_tensors: upload weights that differ from their recorded digests.
        run: checkpoint of the training run that the card describes, if it is not `folder`.

    Raises:
        CheckpointError: the folder is not a complete checkpoint.
        ChangedTensorsError: weights differ from their recorded digests, without `accept_changed_tensors`.
        SettingError: the Hub refuses the repository. The message contains no token.
        ResourceError: the Hub cannot be reached.
    """
    _check_id(repo_id)
    if not folder.is_dir():
        raise CheckpointError(folder, "no such folder")
    folder = checkpoint_folder(folder)
    files, left_out, card = _contents(folder, repo_id, overwrite_card, accept_changed_tensors, run or folder)
    sizes = {name: inside(folder, name).stat().st_size for name in files}
    renamed = {name: found for name in files if (found := _without_local_path(folder, name)) is not None}
    sizes |= {name: len(content) for name, (content, _) in renamed.items()}
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
        renamed={name: public for name, (_, public) in renamed.items()},
    )
    if not dry_run:
        contents = {name: content for name, (content, _) in renamed.items()}
        report.commit = _upload(
            folder, files, contents, card, report, message or f"Upload {folder.resolve().name} with dlm-bridge"
        )
    return report


def create_repository(repo_id: str, private: bool = False, field: str = "repo_id") -> None:
    """Create a repository that does not exist. Raises SettingError with `field`, and ResourceError, as `push`."""
    from huggingface_hub import HfApi

    _check_id(repo_id, field)
    try:
        HfApi(library_name="dlm-bridge").create_repo(repo_id, private=private, exist_ok=True)
    except Exception as error:
        raise _refusal(repo_id, error, field) from None  # a traceback could contain a token


def without_tokens(text: str) -> str:
    """Replace everything in `text` that is or looks like a Hub token by "***"."""
    for secret in _known_tokens():
        text = text.replace(secret, "***")
    return _TOKEN.sub("***", text)


def _check_id(repo_id: str, field: str = "repo_id") -> None:
    if not HUB_ID.fullmatch(repo_id):
        raise SettingError(field, f"{repo_id} is not a Hub id (owner/name)")


def _contents(
    folder: Path, repo_id: str, overwrite_card: bool, accept_changed: bool, run: Path
) -> tuple[list[str], list[str], str | None]:
    """Files to upload, excluded files, and the text of a generated card (None: the own one is kept)."""
    manifest = read_manifest(folder)
    if is_peft_folder(folder):
        adapter = read_config(folder / ADAPTER_CONFIG)
        read_header(inside(folder, ADAPTER_WEIGHTS))
        if not accept_changed and (changed := changed_weights(folder)):
            raise ChangedTensorsError(str(folder), map(str, changed))
        side = list_side_files(folder, {ADAPTER_WEIGHTS})
        files, left_out, family = [ADAPTER_WEIGHTS, *side.kept], list(side.excluded), base_family(adapter)
    else:
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                folder,
                "is neither a Hub checkpoint (config.json) nor a PEFT adapter (adapter_config.json): export a "
                "Megatron checkpoint first",
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
    if CARD in files and not overwrite_card and not is_generated(folder / CARD, family, manifest, adapter):
        return files, left_out, None
    card = pushed_card(folder, repo_id, family, manifest, adapter, training_run(run))
    return [name for name in files if name != CARD], left_out, card


def _without_local_path(folder: Path, name: str) -> tuple[bytes, str] | None:
    """(contents, name) of a file, with the local path of the checkpoint's source replaced by its `public_name`; None
    if the file does not contain a local path."""
    if name == MANIFEST:
        manifest = read_manifest(folder)
        found = None if manifest is None else manifest.source.get("name")
    elif name in _NAMES_A_BASE:
        values = read_json(folder / name)
        found = values.get(_NAMES_A_BASE[name])
    else:
        return None
    if not isinstance(found, str) or (public := public_name(found)) == found:
        return None
    if name == MANIFEST:
        return renamed_source(folder, public), public
    return (json.dumps({**values, _NAMES_A_BASE[name]: public}, indent=2) + "\n").encode(), public


def _upload(
    folder: Path, files: list[str], contents: dict[str, bytes], card: str | None, report: PushReport, message: str
) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi

    operations = [
        CommitOperationAdd(name, contents.get(name) or str(inside(folder, name).resolve())) for name in files
    ]
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
    except Exception as error:
        raise _refusal(report.repo_id, error) from None  # a traceback could contain a token
    return without_tokens(str(info.commit_url))


def _refusal(repo_id: str, error: Exception, field: str = "repo_id") -> SettingError | ResourceError:
    """Error of a failed upload: cause and remedy, without a token."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    detail = without_tokens(one_line(error))[:300]
    if status == 401 or type(error).__name__ == "LocalTokenNotFoundError":
        reason = "the Hub has no valid token of yours (401): run `hf auth login` or set HF_TOKEN"
    elif status == 403:
        reason = f"your token has no write access there (403): use one with write access ({detail})"
    elif status == 404:
        reason = "does not exist on the Hub, or your token has no access to it (404): check owner and name"
    elif status is not None:
        reason = f"the Hub refused the upload ({status}): {detail}"
    else:
        # The network errors of every HTTP client of huggingface_hub have a base of this name.
        network = isinstance(error, OSError) or any(base.__name__ == "TransportError" for base in type(error).__mro__)
        failed = "the Hub cannot be reached" if network else "the upload failed"
        return ResourceError(repo_id, f"{failed}: {type(error).__name__}: {detail}")
    return SettingError(field, f"{repo_id}: {reason}")


def _known_tokens() -> list[str]:
    from huggingface_hub import get_token

    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")
    found = [get_token(), *(os.environ.get(name) for name in names)]
    return [token for token in found if token]
