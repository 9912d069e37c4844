"""Alignment of a model's configs with its tokenizer's special tokens, as in transformers' Trainer.

Training appends the tokenizer's end token; `generate` stops at the end tokens of the model's config and generation
config. If they differ, both end a text: an id that a checkpoint declares is never removed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dlm_bridge.distributed import is_main
from dlm_bridge.errors import printable

logger = logging.getLogger(__name__)
END = "eos_token_id"
SPECIAL_TOKENS = ("bos_token_id", END, "pad_token_id")


def aligned_ids(
    values: Mapping[str, Any], tokens: Mapping[str, int | None], fallback: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Entries of a config or generation config that change when it is aligned with a tokenizer.

    Args:
        values: the config's bos, eos and pad token ids; an eos of [] disables stopping and is kept.
        tokens: the tokenizer's ids by the same names, None for a missing token.
        fallback: ids used for entries that `values` lacks.
    """
    changed: dict[str, Any] = {}
    for name, token in tokens.items():
        own = values.get(name)
        known = (fallback or {}).get(name) if own is None else own
        if token is None or known == token:
            continue
        if name != END or known is None:
            changed[name] = token
        elif own != [] and token not in (ends := [*known] if isinstance(known, list | tuple) else [known]):
            changed[name] = [*ends, token]
    return changed


def align_special_tokens(model: Any, tokenizer: Any, where: str) -> None:
    """Add the tokenizer's end token to the model's config and generation config, set their bos and pad tokens to the
    tokenizer's, and log the changes, beginning with `where`.

    Ignores tokens outside the model's vocabulary, the mask token, and the eos of DreamOn, which deletes masks.
    """
    config, generation = model.config.get_text_config(), getattr(model, "generation_config", None)
    mask = getattr(config, "mask_token_id", None)
    names = [name for name in SPECIAL_TOKENS if name != END or not hasattr(config, "expand_token_id")]
    found = {name: getattr(tokenizer, name, None) for name in names}
    tokens = {name: token for name, token in found.items() if _is_usable(token, config.vocab_size, mask)}
    declared = {name: getattr(config, name, None) for name in tokens}
    changed: dict[str, Any] = {}
    for target in (config, generation):
        new = aligned_ids({name: getattr(target, name, None) for name in tokens}, tokens, declared)
        for name, value in new.items() if target is not None else ():
            setattr(target, name, value)
        changed |= new
    if not is_main():
        return
    if changed:
        taken = ", ".join(f"{name} {value}" for name, value in sorted(changed.items()))
        logger.log(
            logging.WARNING if END in changed else logging.INFO,
            printable(f"{where}: aligned its config with the tokenizer's special tokens: {taken}"),
        )
    other = getattr(tokenizer, "mask_token_id", None)
    if hasattr(model, "family") and type(other) is int and mask is not None and other != mask:
        logger.warning(printable(f"{where}: using the config's mask token {mask}, not the tokenizer's {other}"))


def _is_usable(token: Any, vocabulary_size: int, mask: int | None) -> bool:
    return type(token) is int and 0 <= token < vocabulary_size and token != mask
