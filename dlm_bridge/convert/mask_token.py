"""A mask token for a tokenizer that has none: its files edited in place of its Hub folder, nothing else touched."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm_bridge.convert.side_files import inside
from dlm_bridge.errors import DlmBridgeError, one_line

DEFAULT = "<|mask|>"
_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


@dataclass(frozen=True)
class MaskToken:
    """`files` are the tokenizer files that change, by their names in the folder; `pad_id` is its padding token's."""

    text: str
    id: int
    added: bool
    pad_id: int | None
    files: dict[str, bytes] = field(default_factory=dict)


def mask_token(folder: Path, text: str | None) -> MaskToken:
    """The mask token of a Hub folder's tokenizer: the one that it has, or a special token `text`, which is added
    where it is new. None takes the tokenizer's own mask token, else adds `<|mask|>`.

    Raises DlmBridgeError without a readable tokenizer.json, and where `text` is an ordinary token or another mask
    token than the tokenizer's own.
    """
    from tokenizers import AddedToken, Tokenizer

    if not (folder / _FILE).is_file():
        raise DlmBridgeError(
            f"{folder} has no {_FILE}, which takes the mask token: save its tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) first"
        )
    try:
        tokenizer = Tokenizer.from_file(str(inside(folder, _FILE)))
    except Exception as error:  # tokenizers raises plain Exception
        raise DlmBridgeError(f"{folder / _FILE}: cannot be read: {one_line(error)}") from None
    config = _read(folder, _CONFIG)
    own = _content(config.get("mask_token"))
    if own is not None and text is not None and own != text:
        raise DlmBridgeError(
            f"{folder}: the tokenizer has the mask token {own} already: leave --mask-token {text} out"
        )
    text = own or text or DEFAULT
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    number = tokenizer.token_to_id(text)
    if number is not None and text not in special:
        raise DlmBridgeError(
            f"--mask-token {text} is an ordinary token of the vocabulary: name a new or a special one"
        )
    added = number is None
    files = {}
    if added:
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
        number = tokenizer.token_to_id(text)
        with tempfile.TemporaryDirectory() as temporary:
            tokenizer.save(str(Path(temporary, _FILE)))
            files[_FILE] = Path(temporary, _FILE).read_bytes()
    assert number is not None
    files |= _other_files(folder, config, text, number)
    pad = _content(config.get("pad_token"))
    return MaskToken(text, number, added, None if pad is None else tokenizer.token_to_id(pad), files)


def _other_files(folder: Path, config: dict[str, Any], text: str, number: int) -> dict[str, bytes]:
    """What else of a tokenizer names its special tokens, where the folder has it."""
    config = {**config, "mask_token": text}
    if isinstance(config.get("added_tokens_decoder"), dict):
        known = {str(number): {"content": text, **_FLAGS}}
        config["added_tokens_decoder"] = {**known, **config["added_tokens_decoder"]}
        config["added_tokens_decoder"] = dict(sorted(config["added_tokens_decoder"].items(), key=lambda i: int(i[0])))
    files = {_CONFIG: _text(config)}
    if (folder / "special_tokens_map.json").is_file():
        files["special_tokens_map.json"] = _text({**_read(folder, "special_tokens_map.json"), "mask_token": text})
    if (folder / "added_tokens.json").is_file():
        files["added_tokens.json"] = _text({**_read(folder, "added_tokens.json"), text: number})
    return files


def _read(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        return {}
    try:
        value = json.loads(inside(folder, name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DlmBridgeError(f"{folder / name}: is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise DlmBridgeError(f"{folder / name}: is not a JSON object")
    return value


def _content(token: Any) -> str | None:
    """A token's text, which is written plainly or with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
