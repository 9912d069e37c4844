"""Settings of an evaluation."""
# ruff: noqa: RUF009 (calls of `common_option`)

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_bridge.errors import MissingExtraError, SettingError
from dlm_bridge.settings import check_values, common_option

SINGLE_ANSWER = ("num_return_sequences", "infill", "span_lengths")  # settings of `generate` that tasks do not support
_measuring = functools.partial(common_option, panel="Measuring")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Settings of `dlm_bridge.evaluation.run.evaluate`, and the options of `dlm-bridge eval`.

    Args:
        tasks: names of local tasks or of lm-evaluation-harness's, or YAML files.
        perplexity: text file whose perplexity is measured.
        output: folder for results.json and samples.jsonl.
        limit: maximum number of documents per task, and of windows of the text.
        shots: few-shot examples per prompt; None: the task's number.
        system: system message; without `chat`, a text before each prompt.
        fewshot_as_multiturn: with `chat`: each example is a user message and an answer (None: True), or all examples
            are in one message.
        chat_template_args: variables of the chat template.
        confirm_run_unsafe_code: run tasks that execute code written by the model.
        mc_samples: Monte-Carlo samples per likelihood bound.
        batch_size: rows per forward pass; None: as many as fit into memory.
        max_length: tokens of a prompt and its answer; longer prompts are truncated at the start.
        window: tokens per window of `perplexity`.
        set: settings of `generate`, which take precedence over a task's.
    """

    tasks: list[str] = common_option(
        [], "Tasks: orders, sums (built in), lm-evaluation-harness's, or YAML files.", metavar="T[,T]"
    )
    perplexity: Path | None = common_option(None, "Text file whose perplexity is measured.", metavar="FILE")
    output: Path | None = common_option(None, "Write results.json and samples.jsonl.", metavar="DIR")
    overwrite: bool = common_option(False, "Replace the results in --output.", negative=None)
    resume: bool = common_option(False, "Continue an interrupted evaluation in --output.", negative=None)
    limit: int | None = _measuring(None, "Maximum documents per task, and windows of a text.", minimum=1)
    shots: int | None = _measuring(None, "Few-shot examples per prompt. Default: the task's.", minimum=0)
    chat: bool = _measuring(False, "Format prompts with the tokenizer's chat template.", negative=None)
    system: str | None = _measuring(None, "System message.", metavar="TEXT")
    fewshot_as_multiturn: bool | None = _measuring(
        None, "With --chat: few-shot examples are turns of the chat (default)."
    )
    chat_template_args: dict[str, Any] = _measuring(
        {},
        "With --chat: a variable of the chat template, such as enable_thinking=false. Repeatable.",
        metavar="KEY=VALUE",
    )
    confirm_run_unsafe_code: bool = _measuring(
        False, "Allow tasks that execute code written by the model.", negative=None
    )
    mc_samples: int = _measuring(128, "Monte-Carlo samples per likelihood of a diffusion model.", minimum=1)
    batch_size: int | None = _measuring(
        8, "Rows per forward pass; auto: as many as fit into memory.", minimum=1, metavar="N|auto"
    )
    max_length: int = _measuring(2048, "Maximum tokens of a prompt and its answer.", minimum=2)
    window: int = _measuring(1024, "Tokens per window of --perplexity.", minimum=2)
    seed: int = _measuring(0, "Seed of the noise, the few-shot examples and the sampler.", minimum=0)
    set: dict[str, Any] = _measuring({}, "A setting of generate, such as steps=64. Repeatable.", metavar="NAME=VALUE")

    def check(self) -> None:
        """Raise SettingError or MissingExtraError for settings that are invalid for every model."""
        check_values(self)
        if not self.tasks and self.perplexity is None:
            raise SettingError("tasks", "nothing to evaluate: set `tasks` or `perplexity`")
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            raise MissingExtraError("tasks", "needs lm-evaluation-harness: pip install 'dlm-bridge[eval]'")
        if unsupported := [name for name in SINGLE_ANSWER if name in self.set]:
            raise SettingError(unsupported[0], "tasks have one answer per prompt: remove this setting")
        if self.resume and self.output is None:
            raise SettingError("resume", "continues the evaluation in `output`: set `output`")
        if self.output is not None and not self.overwrite and (self.output / "results.json").exists():
            raise SettingError("output", f"{self.output / 'results.json'} exists: choose another, or set `overwrite`")

    @property
    def rows(self) -> int:
        """Rows per forward pass. `batch_size` must be set."""
        assert self.batch_size is not None
        return self.batch_size

    def identity(self) -> dict[str, Any]:
        """Fingerprint that must match before an interrupted evaluation is resumed: everything that affects its
        values."""
        unrelated = ("batch_size", "output", "overwrite", "resume")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in unrelated}
