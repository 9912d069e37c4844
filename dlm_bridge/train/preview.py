"""Preview of fine-tuning: the first rows of the data as model inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dlm_bridge.data.conversations import first_conversation_blocks
from dlm_bridge.data.documents import Source
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.setup import check_data, conversation_settings, empty_model, resolve_objective, with_seq_length


@dataclass(frozen=True)
class PreviewExample:
    """Row without padding.

    Args:
        trained: per token, True if it can be masked and counts in the loss.
        pieces: (text, trained) of consecutive tokens with the same `trained`.
    """

    input_ids: list[int]
    trained: list[bool]
    pieces: list[tuple[str, bool]]

    def as_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        text = "".join(piece for piece, _ in self.pieces)
        return {"input_ids": self.input_ids, "trained": self.trained, "text": text}


def preview(config: TrainConfig, count: int) -> Iterator[PreviewExample]:
    """Yield the first `count` rows of the data in their order. Reads no weights and writes nothing. Raises the same
    errors as the run."""
    found = check_data(config.replace(data_cache=None))
    model = empty_model(config, None)
    config, objective = resolve_objective(config, model)
    config = with_seq_length(config, model, objective.mask_token, found)
    tokenizer, settings = conversation_settings(config, model, objective.mask_token)
    for part in found.parts:
        blocks = first_conversation_blocks(cast(Sequence[Source], part), tokenizer, settings, count)
        rows = blocks.rows(range(len(blocks)))
        assert rows.labels is not None, "conversations have labels"
        for place in range(len(blocks)):
            real = slice(None) if rows.attention_mask is None else rows.attention_mask[place]
            ids = rows.input_ids[place, real].tolist()
            trained = (rows.labels[place, real] != IGNORE_INDEX).tolist()
            runs = itertools.groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1])
            pieces = [(tokenizer.decode([token for token, _ in run]), counts) for counts, run in runs]
            yield PreviewExample(ids, trained, pieces)
        count -= len(blocks)
        if count <= 0:
            return
