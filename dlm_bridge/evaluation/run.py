"""An evaluation from loading to results: perplexity of a text and tasks, on any number of processes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from dlm_bridge.errors import CheckpointError
from dlm_bridge.evaluation.options import EvaluationOptions
from dlm_bridge.evaluation.perplexity import text_perplexity
from dlm_bridge.evaluation.report import RESULTS, report, write
from dlm_bridge.evaluation.resume import FinishedParts
from dlm_bridge.files.partial import PartialOutput
from dlm_bridge.generation.batch_size import plan_shared_batch
from dlm_bridge.hub import checkpoint_folder
from dlm_bridge.job import process_group_ends
from dlm_bridge.loading import LoadedModel, Placement, join_replicas, load_model
from dlm_bridge.replicas import Replicas
from dlm_bridge.settings import LoadingOptions

logger = logging.getLogger(__name__)


def evaluate(model: str, options: EvaluationOptions, loading: LoadingOptions) -> dict[str, Any] | None:
    """Evaluate a model, and write the results to `options.output`.

    Returns:
        The content of results.json in the main process; None in the others.

    Raises:
        SettingError: a setting is invalid or not supported by the model.
        CheckpointError: the model does not load.
        InputFileError: the text or a task's data cannot be read.
        RowError: a document or a window of the text cannot be evaluated.
    """
    options.check()
    placement = Placement.of(loading, replicated=True)
    with process_group_ends():
        opened = load_model(model, placement, **loading.source)
        replicas = join_replicas(placement)
        options = _fit(options, model, opened, replicas)
        unfinished, finished = None, None
        if options.output is not None:
            folder = str(checkpoint_folder(model).absolute())
            call = [folder, loading.revision, loading.like, str(opened.model.dtype)]
            unfinished = PartialOutput(options.output / RESULTS, [call, options.identity()], replicas.number)
            finished = FinishedParts.open(unfinished, options.resume, options.overwrite, replicas)
        try:
            text, found = None, None
            if options.perplexity is not None:
                text = text_perplexity(opened, options.perplexity, options, replicas, finished)
            if options.tasks:
                from dlm_bridge.evaluation.harness import run_tasks

                found = run_tasks(opened, options, replicas, finished)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted" + ("" if unfinished is None else unfinished.note())) from None
        finally:
            if unfinished is not None:
                unfinished.close()
    if not replicas.leads:
        return None
    facts = report(model, opened, options, replicas.shares, found, text)
    if options.output is not None:
        write(options.output, facts, found, options.overwrite)
        assert unfinished is not None
        unfinished.remove()
    return facts


def _fit(options: EvaluationOptions, name: str, opened: LoadedModel, replicas: Replicas) -> EvaluationOptions:
    """Limit `max_length` and `window` to the model's context, and compute the batch size from free memory if none is
    set."""
    context = getattr(opened.model.config, "max_position_embeddings", None) or options.max_length
    if context < 2:
        raise CheckpointError(name, f"the context in config.json is {context}, but a text needs two positions")
    max_length, rows = min(options.max_length, context), options.batch_size
    if rows is None:
        plan = plan_shared_batch(
            replicas, opened.model, [max_length], options.set, diffusion=opened.diffusion, scored=True
        )
        rows = plan.rows
        if replicas.leads:
            logger.warning(plan.summary)
    return replace(options, max_length=max_length, window=min(options.window, context), batch_size=rows)
