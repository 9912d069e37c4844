"""`dlm-bridge eval`: tasks of lm-evaluation-harness and perplexity of a text, for both kinds of model."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge.cli.generate_request import parse_batch_size, parse_settings, parse_template_args
from dlm_bridge.cli.help import (
    LOADING,
    ChatTemplateArgs,
    Device,
    DeviceMap,
    Dtype,
    Family,
    Like,
    Model,
    ModelCommand,
    Revision,
    Tokenizer,
    TpPlan,
)
from dlm_bridge.errors import DlmBridgeError, printable

if TYPE_CHECKING:
    from dlm_bridge.distributed import Replicas
    from dlm_bridge.evaluation.perplexity import Perplexity
    from dlm_bridge.evaluation.resume import FinishedParts
    from dlm_bridge.loading import LoadedModel

MEASURING = "Measuring"
NOT_OF_TASKS = ("num_return_sequences", "infill", "span_lengths")  # settings of generate


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("eval", cls=ModelCommand)(evaluate)


def evaluate(
    model: Model,
    tasks: Annotated[
        list[str] | None,
        typer.Option(metavar="T[,T]", help="Tasks: orders, sums (built in), lm-evaluation-harness's, or YAML files."),
    ] = None,
    perplexity: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text file whose perplexity is measured.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Write results.json and samples.jsonl.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in --output.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted evaluation in --output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json to stdout.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum documents per task, and windows of a text.", rich_help_panel=MEASURING),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(min=0, help="Few-shot examples per prompt. Default: the task's.", rich_help_panel=MEASURING),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Format prompts with the tokenizer's chat template.", rich_help_panel=MEASURING),
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message.", rich_help_panel=MEASURING)
    ] = None,
    fewshot_as_multiturn: Annotated[
        bool | None,
        typer.Option(
            help="With --chat: few-shot examples are turns of the chat (default).", rich_help_panel=MEASURING
        ),
    ] = None,
    chat_template_args: ChatTemplateArgs = None,
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option(
            "--confirm-run-unsafe-code",
            help="Allow tasks that execute code written by the model.",
            rich_help_panel=MEASURING,
        ),
    ] = False,
    mc_samples: Annotated[
        int,
        typer.Option(
            min=1, help="Monte-Carlo samples per likelihood of a diffusion model.", rich_help_panel=MEASURING
        ),
    ] = 128,
    batch_size: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Rows per forward pass; auto: as many as fit into memory.",
            rich_help_panel=MEASURING,
        ),
    ] = "8",
    max_length: Annotated[
        int, typer.Option(min=2, help="Maximum tokens of a prompt and its answer.", rich_help_panel=MEASURING)
    ] = 2048,
    window: Annotated[
        int, typer.Option(min=2, help="Tokens per window of --perplexity.", rich_help_panel=MEASURING)
    ] = 1024,
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Seed of the noise, the few-shot examples and the sampler.", rich_help_panel=MEASURING
        ),
    ] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of generate, such as steps=64. Repeatable.",
            rich_help_panel=MEASURING,
        ),
    ] = None,
    dtype: Dtype = "keep",
    device: Device = None,
    device_map: DeviceMap = None,
    tp_plan: TpPlan = None,
    tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Shard the model over N processes; each group of N gets a part of the rows.",
            rich_help_panel=LOADING,
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    family: Family = None,
    revision: Revision = None,
    like: Like = None,
) -> None:
    """Evaluate a model on lm-evaluation-harness's tasks, or measure the perplexity of a text.

    Diffusion models: likelihoods are Monte-Carlo bounds, texts come from the family's sampler. Autoregressive models:
    exact, by lm-evaluation-harness. Decoding is greedy unless a task or --set temperature=T samples. The results file
    records every setting that affects the figures.

    Example:

      dlm-bridge eval GSAI-ML/LLaDA-8B-Instruct --tasks sums,orders --limit 32 --output results/

      dlm-bridge eval MODEL --tasks gsm8k --chat --set gen_length=256 --set steps=128 --perplexity heldout.txt

    On several GPUs, each with the whole model and a part of the rows (with --tp N, N GPUs share a model):

      torchrun --nproc-per-node 8 -m dlm_bridge.cli eval MODEL --tasks gsm8k --output results/
    """
    request = EvaluationRequest(
        tasks=[name.strip() for group in tasks or [] for name in group.split(",") if name.strip()],
        perplexity=perplexity,
        limit=limit,
        shots=shots,
        chat=chat,
        system=system,
        fewshot_as_multiturn=fewshot_as_multiturn,
        template_args=parse_template_args(chat_template_args or []),
        run_unsafe_code=confirm_run_unsafe_code,
        mc_samples=mc_samples,
        batch_size=parse_batch_size(batch_size),
        max_length=max_length,
        window=window,
        seed=seed,
        sampler=parse_settings(set_ or []),
    )
    request.check()
    if resume and output is None:
        raise DlmBridgeError("--resume continues the evaluation in --output: set --output")
    if output is not None and not overwrite and (output / "results.json").exists():
        raise DlmBridgeError(f"{output / 'results.json'} exists: choose another --output or set --overwrite")
    # Imported only now: a mistyped option should answer at once.
    from transformers.utils import logging

    from dlm_bridge.distributed import process_group_ends
    from dlm_bridge.evaluation.report import RESULTS, report, write
    from dlm_bridge.evaluation.resume import FinishedParts
    from dlm_bridge.files.partial import PartialOutput
    from dlm_bridge.hub import checkpoint_folder
    from dlm_bridge.loading import Placement, join_replicas, load_model

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    placement = Placement(device, device_map, tp_plan=tp_plan, replicated=True, tp=tp)
    with process_group_ends():
        opened = load_model(
            model, placement, dtype=dtype, family=family, revision=revision, like=like, tokenizer=tokenizer
        )
        replicas = join_replicas(placement)
        request = request.fit(model, opened, replicas)
        unfinished, finished = None, None
        if output is not None:
            call = [str(checkpoint_folder(model).absolute()), revision, like, str(opened.model.dtype)]
            unfinished = PartialOutput(output / RESULTS, [call, request.identity()], replicas.number)
            finished = FinishedParts.open(unfinished, resume, overwrite, replicas)
        try:
            text = request.measure_text(opened, replicas, finished)
            found = request.run_tasks(opened, replicas, finished)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted" + ("" if unfinished is None else unfinished.note())) from None
    if not replicas.leads:
        return
    facts = report(model, opened, request.record(opened, replicas), found, text)
    if output is not None:
        write(output, facts, found, overwrite)
        assert unfinished is not None
        unfinished.remove()
    if as_json:
        typer.echo(json.dumps(facts, indent=2, default=str))
    else:
        _show(facts)


@dataclass(frozen=True)
class EvaluationRequest:
    """Options of one evaluation."""

    tasks: list[str]
    perplexity: Path | None
    limit: int | None
    shots: int | None
    chat: bool
    system: str | None
    fewshot_as_multiturn: bool | None
    template_args: dict[str, Any]
    run_unsafe_code: bool
    mc_samples: int
    batch_size: int | None  # None: as memory allows
    max_length: int
    window: int
    seed: int
    sampler: dict[str, Any]

    def check(self) -> None:
        """Raise DlmBridgeError for options that are invalid for every model."""
        if not self.tasks and self.perplexity is None:
            raise DlmBridgeError("nothing to evaluate: set --tasks T[,T] or --perplexity FILE")
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            raise DlmBridgeError("--tasks needs lm-evaluation-harness: pip install 'dlm-bridge[eval]'")
        for flag, given in (
            ("--fewshot-as-multiturn", self.fewshot_as_multiturn), ("--chat-template-args", self.template_args)
        ):  # fmt: skip
            if given and not self.chat:
                raise DlmBridgeError(f"{flag} needs --chat")
        for name in NOT_OF_TASKS:
            if name in self.sampler:
                raise DlmBridgeError(f"--set {name}: tasks have one answer per prompt: remove this setting")

    def fit(self, name: str, opened: LoadedModel, replicas: Replicas) -> EvaluationRequest:
        """The request with `max_length` limited to the model's context, and a batch size computed from free memory if
        none is set. `name`: the model's name in errors."""
        from dlm_bridge.generation.batch_size import plan_shared_batch

        context = getattr(opened.model.config, "max_position_embeddings", None) or self.max_length
        if context < 2:
            raise DlmBridgeError(
                f"{name}: a context of {context} position, but a text needs two: its config.json is damaged"
            )
        max_length, rows = min(self.max_length, context), self.batch_size
        if rows is None:
            plan = plan_shared_batch(
                replicas, opened.model, [max_length], self.sampler, diffusion=opened.diffusion, scored=True
            )
            rows = plan.rows
            if replicas.leads:
                typer.echo(plan.summary, err=True)
        return dataclasses.replace(self, max_length=max_length, window=min(self.window, context), batch_size=rows)

    def identity(self) -> dict[str, Any]:
        """Fingerprint that must match before an interrupted evaluation is resumed: everything that affects its
        values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "batch_size"}

    def measure_text(
        self, opened: LoadedModel, replicas: Replicas, finished: FinishedParts | None
    ) -> Perplexity | None:
        """Perplexity of the text, None without --perplexity."""
        from dlm_bridge.evaluation.perplexity import text_perplexity

        if self.perplexity is None:
            return None
        assert self.batch_size is not None
        return text_perplexity(
            opened.model,
            opened.tokenizer,
            self.perplexity,
            diffusion=opened.diffusion,
            samples=self.mc_samples,
            window=self.window,
            limit=self.limit,
            seed=self.seed,
            batch_size=self.batch_size,
            replicas=replicas,
            finished=finished,
        )

    def run_tasks(
        self, opened: LoadedModel, replicas: Replicas, finished: FinishedParts | None
    ) -> dict[str, Any] | None:
        """Results of the tasks in lm-evaluation-harness's format, None without --tasks."""
        if not self.tasks:
            return None
        from dlm_bridge.evaluation.harness import HarnessSettings, run_tasks

        assert self.batch_size is not None
        settings = HarnessSettings(
            samples=self.mc_samples,
            batch_size=self.batch_size,
            max_length=self.max_length,
            seed=self.seed,
            limit=self.limit,
            shots=self.shots,
            chat=self.chat,
            system=self.system,
            fewshot_as_multiturn=self.fewshot_as_multiturn is not False,
            template_args=self.template_args,
            run_unsafe_code=self.run_unsafe_code,
            sampler=self.sampler,
        )
        return run_tasks(opened, self.tasks, settings, replicas, finished)

    def record(self, opened: LoadedModel, replicas: Replicas) -> dict[str, Any]:
        """Settings for results.json."""
        return {
            "tasks": self.tasks,
            "perplexity": None if self.perplexity is None else str(self.perplexity),
            "limit": self.limit,
            "shots": self.shots,
            "chat": self.chat,
            "system": self.system,
            "fewshot_as_multiturn": self.fewshot_as_multiturn is not False if self.chat else None,
            "chat_template_args": self.template_args,
            "mc_samples": self.mc_samples if opened.diffusion else None,
            "batch_size": self.batch_size,
            "processes": replicas.shares,
            "max_length": self.max_length,
            "seed": self.seed,
            "sampler": self.sampler,
        }


def _show(facts: Mapping[str, Any]) -> None:
    """Print a table of the results, followed by the settings."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if "COLUMNS" in os.environ else max(Console().width, 100), markup=False)
    table = Table(title=printable(f"{facts['model']} ({facts['family']}, {facts['dtype']})"))
    for column in ("task", "metric", "value", "± standard error", "documents"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for task, entry in facts.get("tasks", {}).items():
        for metric, value in entry["metrics"].items():
            kind, _, filtered = metric.partition(",")
            if kind == "sample_len" or kind.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = entry["metrics"].get(f"{kind}_stderr,{filtered}")
            documents = (entry["documents"] or {}).get("effective", "")
            shown = kind if filtered in ("", "none") else f"{kind} ({filtered})"
            spread = f"{error:.4f}" if isinstance(error, int | float) else ""
            table.add_row(printable(str(task)), shown, f"{value:.4f}", spread, str(documents))
    if text := facts.get("perplexity"):
        bound = "" if text["exact"] else ", at most"
        size = f"{text['tokens']:,} tokens"
        table.add_row("perplexity", f"by token{bound}", f"{text['perplexity']:.4f}", "", size)
        table.add_row("", f"nats a token{bound}", f"{text['nats']:.4f}", f"{text['error']:.4f}", size)
        table.add_row("", f"bits a byte{bound}", f"{text['bits_per_byte']:.4f}", "", f"{text['bytes']:,} bytes")
    console.print(table)
    console.print(f"likelihood: {facts['likelihood']}", highlight=False)
    settings = facts["settings"] | ({"window": text["window"]} if text else {})
    console.print(
        printable(", ".join(f"{name} {value}" for name, value in settings.items() if value not in (None, {}, []))),
        highlight=False,
    )
