"""lm-evaluation-harness: local tasks, the harness's model classes for this package's models, running tasks."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from traceback import walk_tb
from typing import Any
from unittest.mock import patch

import torch
import yaml
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import LogitsProcessorList

from dlm_bridge.errors import (
    DlmBridgeError,
    InputFileError,
    NonFiniteError,
    RowError,
    SettingError,
    counted,
    rows_named,
)
from dlm_bridge.evaluation.likelihood import Answer, check_answers, check_finite, is_greedy, likelihood_bounds
from dlm_bridge.evaluation.options import EvaluationOptions
from dlm_bridge.evaluation.perplexity import NO_LIKELIHOOD, first_token, windows
from dlm_bridge.evaluation.resume import FinishedParts
from dlm_bridge.files.reading import library_cause
from dlm_bridge.generation.autoregressive import FiniteLogits, drawing_from, refusals_named
from dlm_bridge.generation.config import SAMPLING_ONLY, merge_names
from dlm_bridge.generation.gemma import gemma_keywords, is_gemma
from dlm_bridge.generation.offline import PromptSampler, prompt_errors
from dlm_bridge.generation.prompts import render_chat
from dlm_bridge.generation.request import Failed
from dlm_bridge.generation.settings import combine_settings, resolve_settings
from dlm_bridge.generation.token_sampling import row_seeds
from dlm_bridge.loading import LoadedModel
from dlm_bridge.replicas import ALONE, Replicas, in_all_processes, serve

# Tasks whose data is part of the package, for evaluation without a network.
FOLDER = Path(__file__).parent / "tasks"
LOCAL = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def local_task(name: str) -> dict[str, Any]:
    """Configuration of a task of `LOCAL`, for lm-evaluation-harness's TaskManager."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    data = {"data_files": {"test": str(FOLDER / f"{name}.jsonl")}}
    return {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **config}


TOGETHER = 256  # documents of an autoregressive model that are saved at a time, for resuming
NEW_TOKENS = 256  # if neither the task nor the caller sets a length
# The harness's names for the number of new tokens.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class DiffusionHarness(TemplateLM):
    """Diffusion model for the harness: Monte-Carlo likelihood bounds, texts by the family's sampler.

    Args:
        greedy_tasks: tasks with metrics that compare an answer with greedy decoding, which takes additional forward
            passes. For other tasks False is reported.
    """

    def __init__(
        self,
        opened: LoadedModel,
        options: EvaluationOptions,
        greedy_tasks: frozenset[str] = frozenset(),
        replicas: Replicas = ALONE,
        finished: FinishedParts | None = None,
    ) -> None:
        super().__init__()
        self.replicas, self.finished = replicas, finished or FinishedParts()
        self.model = opened.model
        self.tokenizer = opened.tokenizer
        self.options = options
        self.greedy_tasks = greedy_tasks
        self.sampled: dict[str, dict[str, Any]] = {}  # sampler settings by task
        self._device = opened.model.device

    @property
    def eot_token_id(self) -> int:
        return first_token(self.model, self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        first = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None and first and string.startswith(first):
            add_special_tokens = False  # the chat template has added it, as in HFLM
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, **special)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return _chat(self.tokenizer, chat_history, self.options, add_generation_prompt)

    def check(self, requests: Sequence[Instance]) -> None:
        """Raise RowError, whose rows are documents, for requests that cannot be run. All requests are checked before
        the first is run, because a metric without them would not be comparable."""
        answers: list[Answer] = []
        owners: list[Instance] = []
        texts = [request for request in requests if request.request_type == "generate_until"]
        for request in requests:
            if request.request_type == "generate_until":
                continue
            try:
                rolling = request.request_type == "loglikelihood_rolling"
                own = self._windows(request) if rolling else [self._pair(*request.args)]
            except SettingError as error:
                raise RowError(str(error), [_documents([request])(0)]) from error
            answers += own
            owners += [request] * len(own)
        if answers:
            with rows_named(_documents(owners)):
                self._check_answers(answers)
        name = _documents(texts)
        for members, settings, _, prompts in self._groups(texts):
            named = [(name(number), prompt) for number, prompt in zip(members, prompts, strict=True)]
            if errors := prompt_errors(self.model, named, settings):
                reason = next(iter(errors.values())).reason
                raise RowError(reason, [named[number][0] for number in errors])

    @in_all_processes
    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(bound, True if greedy decoding gives the continuation) of each continuation."""
        with rows_named(_documents(requests)):
            found = super().loglikelihood(requests, disable_tqdm=True)
        asked = [number for number, request in enumerate(requests) if request.task_name in self.greedy_tasks]
        pairs = [self._pair(*requests[number].args) for number in asked]
        section, known = self.finished.section("greedy", [astuple(pair) for pair in pairs])
        greedy = {place: bool(value) for place, value in known.items()}
        with self.replicas.named():
            for place in self.replicas.share([place for place in range(len(pairs)) if place not in known]):
                greedy[place] = is_greedy(self.model, pairs[place])
                self.finished.add(section, {place: greedy[place]})
        greedily = dict(zip(asked, self.replicas.collect(greedy), strict=True))
        return [(value, greedily.get(number, False)) for number, (value, _) in enumerate(found)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        answers = [self._fitted(context, continuation) for _, context, continuation in requests]
        return [(bound.value, False) for bound in self._bounds(answers)]

    @in_all_processes
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Bound of each text, summed over its windows."""
        totals = []
        for request in requests:
            rows = self._windows(request)
            with rows_named(_documents([request] * len(rows))):
                totals.append(sum(bound.value for bound in self._bounds(rows)))
        return totals

    @in_all_processes
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first of the task's stop strings."""
        texts = [""] * len(requests)
        for members, settings, until, prompts in self._groups(requests):
            for number in members:
                self.sampled.setdefault(str(requests[number].task_name), self._record(settings))
            section, known = self.finished.section("texts", [prompts, settings])
            found = dict(known)
            with self.replicas.named(), rows_named(_documents([requests[number] for number in members])):
                for place, text in self._texts(prompts, {**settings, "num_return_sequences": 1}, known):
                    self.finished.add(section, {place: text})
                    found[place] = text
            for place, text in enumerate(self.replicas.collect(found)):
                texts[members[place]] = _before(text, until)
        return texts

    def _groups(
        self, requests: Sequence[Instance]
    ) -> Iterator[tuple[list[int], dict[str, Any], list[str], list[list[int]]]]:
        """Group requests by settings: indices of the requests, arguments of `generate`, stop strings, and prompts."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for members in groups.values():
            settings, until = self._sampler(requests[members[0]].args[1])
            new, room = settings["max_new_tokens"], self.options.max_length - int(settings["max_new_tokens"])
            if room < 1:
                raise SettingError(
                    "max_length", f"{counted(new, 'new token')} leave no room for a prompt: increase it"
                )
            yield members, settings, until, [self.tok_encode(requests[number].args[0])[-room:] for number in members]

    def _texts(
        self, prompts: list[list[int]], settings: dict[str, Any], known: Container[int]
    ) -> Iterator[tuple[int, str]]:
        """Yield (index, text) of this process's prompts that are not `known`, in any order."""
        size = self.options.rows
        for row in PromptSampler(self.model, self.tokenizer, prompts, settings, size, self.replicas, skip=known):
            if isinstance(row, Failed):
                raise row.error
            yield row.name, self.tokenizer.decode(row.tokens, skip_special_tokens=True)

    def _sampler(self, asked: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Keyword arguments of `generate` and stop strings for a task's request.

        The caller's settings take precedence over the task's. As with the harness's own models, decoding is greedy
        unless the task or the caller asks for sampling.
        """
        rest, own = dict(asked), combine_settings(self.model, {}, self.options.set)
        until = rest.pop("until", None) or []
        until = [string for string in ([until] if isinstance(until, str) else until) if string]
        lengths = [rest.pop(name, None) for name in LENGTHS]
        length = next((value for value in lengths if value is not None), NEW_TOKENS)
        temperature, do_sample = rest.pop("temperature", None), rest.pop("do_sample", None)
        settings: dict[str, Any] = {"max_new_tokens": length, "seed": self.options.seed}
        if "temperature" not in own and "do_sample" not in own:
            draws = bool(temperature) if do_sample is None else do_sample
            settings["temperature"] = (1.0 if temperature is None else temperature) if draws else 0.0
        greedy = own.get("do_sample") is False or (settings | own).get("temperature") == 0
        settings |= {name: value for name, value in rest.items() if not (greedy and name in SAMPLING_ONLY)}
        if until:
            settings["stop_strings"] = until
        return combine_settings(self.model, settings, own), until

    def _record(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of a call of `generate`, including defaults."""
        found = resolve_settings(self.model, None, settings, prompt_width=1)
        return {
            "algorithm": found.sampler.name,
            **{name: getattr(found.sampler, name) for name in found.sampler.parameters()},
            **found.constraints,
            "eos_token_ids": list(found.eos_token_ids),
            "mask_token_id": found.limits.mask_token_id,
            "stop_strings": list(found.stop_strings),
            "seed": found.seed,
            "cache": str(found.cache) if found.cache is not None else None,
        }

    def _bounds(self, answers: Sequence[Answer]) -> list[Any]:
        given = self.options
        return likelihood_bounds(
            self.model, answers, given.mc_samples, given.seed, given.rows, self.replicas, self.finished
        )

    def _check_answers(self, answers: Sequence[Answer]) -> None:
        check_answers(self.model, answers)

    def _windows(self, request: Instance) -> list[Answer]:
        ids = self.tok_encode(request.args[0], add_special_tokens=False)
        return list(windows(ids, self.prefix_token_id, self.options.max_length))

    def _pair(self, context: str, continuation: str) -> Answer:
        if context:
            return self._fitted(*self._encode_pair(context, continuation))
        return self._fitted([self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False))

    def _fitted(self, context: list[int], continuation: list[int]) -> Answer:
        room = self.options.max_length - len(continuation)
        if room < 1:
            raise SettingError("max_length", f"must exceed the {counted(len(continuation), 'token')} of an answer")
        return Answer(tuple((context or [self.prefix_token_id])[-room:]), tuple(continuation))


class GemmaHarness(DiffusionHarness):
    """DiffusionGemma for the harness: texts, equal to those of transformers' `generate`, without likelihoods.

    The sampler has its own temperatures: a task's temperature and `do_sample` have no effect.
    """

    def _sampler(self, asked: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        settings, until = super()._sampler(asked)
        own = self.options.set
        return {
            name: value
            for name, value in settings.items()
            if name in own or name not in ("temperature", "do_sample", *SAMPLING_ONLY)
        }, until

    def _record(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {"algorithm": "entropy_bound", **gemma_keywords(self.model, settings)}

    def _check_answers(self, answers: Sequence[Answer]) -> None:
        self._bounds(answers)

    def _bounds(self, answers: Sequence[Answer]) -> list[Any]:
        raise SettingError("tasks", NO_LIKELIHOOD)


class AutoregressiveHarness(HFLM):
    """Autoregressive model: the harness's own class, on this process's part of the documents.

    All requests of a document run in one process: the harness reuses the logits of their common prompt. Each sampled
    text has its own seed (`row_seeds`), which depends on neither batches nor processes.
    """

    def __init__(
        self,
        opened: LoadedModel,
        options: EvaluationOptions,
        replicas: Replicas = ALONE,
        finished: FinishedParts | None = None,
    ) -> None:
        super().__init__(
            pretrained=opened.model,
            tokenizer=opened.tokenizer,
            batch_size=options.rows,
            max_length=options.max_length,
            truncation=True,
        )
        self.replicas, self.finished = replicas, finished or FinishedParts()
        self.options = options
        self._seed = options.seed
        self._seeds: dict[str, deque[int]] = {}  # by prompt: seeds of the texts that are not sampled yet
        self._prompts: Sequence[str] = ()  # prompts of the current batch
        self._documents: dict[str, str] = {}  # name of each prompt's document

    @in_all_processes
    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        found = self._of_share(super().loglikelihood, requests, disable_tqdm)
        with rows_named(_documents(requests)):
            check_finite([value for value, _ in found])
        return found

    @in_all_processes
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        found = self._of_share(super().loglikelihood_rolling, requests, disable_tqdm)
        with rows_named(_documents(requests)):
            check_finite(found)
        return found

    @in_all_processes
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        # Seeds of all requests, so that repeated prompts differ in whichever process they are sampled.
        prompts = [request.args[0] for request in requests]
        seeds = row_seeds(self._seed, [tuple(prompt.encode()) for prompt in prompts])
        name = _documents(requests)

        def begin(own: list[int]) -> None:
            self._seeds = {}
            self._documents = {prompts[number]: name(number) for number in own}
            for number in own:
                self._seeds.setdefault(prompts[number], deque()).append(seeds[number])

        return self._of_share(super().generate_until, requests, disable_tqdm, begin)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        # HFLM drops a system message that the template refuses.
        return _chat(self.tokenizer, chat_history, self.options, add_generation_prompt)

    def tok_batch_encode(self, strings: list[str], **options: Any) -> Any:
        self._prompts = strings  # the next call of `_model_generate` completes these
        return super().tok_batch_encode(strings, **options)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **settings: Any) -> Any:
        if settings.get("do_sample") and settings.get("num_beams", 1) == 1:
            settings["custom_generate"] = drawing_from([self._seeds[each].popleft() for each in self._prompts])
        check = FiniteLogits(len(context))
        with refusals_named():
            found = super()._model_generate(
                context, max_length, stop, **settings, logits_processor=LogitsProcessorList([check])
            )
        # Up to one token after the last that is not padding: EOS may be the padding token.
        written = (found[:, context.shape[1] :] != self.tokenizer.pad_token_id).cumsum(dim=1).argmax(dim=1) + 2
        ends = (context.shape[1] + written).clamp(max=found.shape[1]).tolist()
        columns = check.finite(len(found), found.shape[1])
        rows = zip(self._prompts, columns, ends, strict=True)
        failed = [self._documents[prompt] for prompt, column, end in rows if column < end]
        if failed:
            raise NonFiniteError(rows=failed)
        return found

    def _of_share(
        self,
        method: Callable[..., list[Any]],
        requests: list[Instance],
        disable_tqdm: bool,
        begin: Callable[[list[int]], None] = lambda own: None,
    ) -> list[Any]:
        """Results of all requests, of which this process computes its part. `begin` is called with the indices of that
        part."""
        section, known = self.finished.section(method.__name__, [request.args for request in requests])
        documents: dict[tuple[Any, Any], list[int]] = {}
        for number, request in enumerate(requests):
            documents.setdefault((request.task_name, request.doc_id), []).append(number)
        left = [numbers for numbers in documents.values() if any(number not in known for number in numbers)]
        own = self.replicas.share(left)
        begin([number for numbers in own for number in numbers])
        found: dict[int, Any] = {
            number: tuple(value) if isinstance(value, list) else value for number, value in known.items()
        }
        with self.replicas.named():
            hidden = disable_tqdm or not self.replicas.leads
            for start in range(0, len(own), TOGETHER):
                part = [number for numbers in own[start : start + TOGETHER] for number in numbers]
                values = method([requests[number] for number in part], disable_tqdm=hidden)
                done = dict(zip(part, values, strict=True))
                self.finished.add(section, done)
                found |= done
        return self.replicas.collect(found)


def _chat(
    tokenizer: Any, messages: list[dict[str, str]], options: EvaluationOptions, add_generation_prompt: bool
) -> str:
    return render_chat(tokenizer, messages, "chat", options.chat_template_args, add_generation_prompt)


def run_tasks(
    opened: LoadedModel,
    options: EvaluationOptions,
    replicas: Replicas = ALONE,
    finished: FinishedParts | None = None,
) -> dict[str, Any] | None:
    """Run the tasks of `options`.

    Returns:
        In the main process, the results of lm-evaluation-harness ("results" and "versions" by task, "samples",
        "n-samples"), with "sampled": by task, the sampler settings of a diffusion model. None in the other processes,
        which only answer the requests of the main process's harness.

    Raises:
        SettingError: a task is unknown, or a setting is not supported.
        InputFileError: the data of a task is not available or damaged.
        RowError: a document cannot be evaluated.
    """
    names = options.tasks
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if options.confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # required by the metric code_eval
    if not replicas.leads:
        torch.manual_seed(options.seed + replicas.number)  # for beam sampling
        serve(_harness_model(opened, options, replicas.broadcast(), replicas, finished))
        return None
    manager = TaskManager(include_defaults=any(_is_harness_task(name) for name in names))
    known = {*LOCAL, *manager.all_tasks}
    for name in names:
        if _is_harness_task(name) and name not in known:
            near = ", ".join(manager.match_tasks([f"*{name}*"])[:5]) or "those of `lm-eval ls tasks`"
            raise SettingError("tasks", f"{name} is unknown: built in are {', '.join(LOCAL)}; the harness has {near}")
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise InputFileError(name, "no such file")
    try:
        asked_for = [local_task(name) if name in LOCAL else name for name in names]
        loaded = manager.load(asked_for)
        kinds = {name: task.get_config("output_type") for name, task in loaded["tasks"].items()}
        unsafe = [name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
        if unsafe and not options.confirm_run_unsafe_code:
            raise SettingError(
                "confirm_run_unsafe_code",
                f"{unsafe[0]} executes code written by the model: use a container, and set it",
            )
        if options.chat and opened.tokenizer.chat_template is None:
            raise SettingError(
                "chat",
                "the tokenizer has no chat template, as base models have none: evaluate without `chat`, or add the "
                "template that the model was trained with to its folder, as chat_template.jinja",
            )
        greedy_tasks = frozenset(name for name, kind in kinds.items() if kind == "loglikelihood")
        asked = _harness_model(opened, options, replicas.broadcast(greedy_tasks), replicas, finished)
        with (
            patch.object(evaluator, "get_git_commit_hash", lambda: None),  # logs an error outside of a repository
            _checked_requests(asked),
        ):
            results = evaluator.simple_evaluate(
                model=asked,
                tasks=asked_for if loaded["groups"] else list(loaded["tasks"].values()),
                task_manager=manager,
                num_fewshot=options.shots,
                limit=options.limit,
                batch_size=options.batch_size,
                apply_chat_template=options.chat,
                system_instruction=options.system,
                fewshot_as_multiturn=options.chat and options.fewshot_as_multiturn is not False,
                confirm_run_unsafe_code=options.confirm_run_unsafe_code,
                gen_kwargs=None if isinstance(asked, DiffusionHarness) else _transformers_settings(options) or None,
                random_seed=options.seed,
                numpy_random_seed=options.seed,
                torch_random_seed=options.seed,
                fewshot_random_seed=options.seed,
                bootstrap_iters=1000,
            )
    except DlmBridgeError:
        raise
    except Exception as error:
        if _is_internal(error):
            raise
        raise InputFileError(",".join(names), library_cause(error)) from error
    replicas.broadcast()  # ends `serve` in the other processes
    return {**results, "sampled": getattr(asked, "sampled", {})}


@contextmanager
def _checked_requests(asked: Any) -> Iterator[None]:
    """Context manager: a diffusion model checks the requests of all tasks, which the harness builds before it runs
    any."""
    build = Task.build_all_requests

    def build_and_check(task: Task, **options: Any) -> None:
        build(task, **options)
        asked.check(task.instances)

    with patch.object(Task, "build_all_requests", build_and_check if hasattr(asked, "check") else build):
        yield


def _harness_model(
    opened: LoadedModel,
    options: EvaluationOptions,
    greedy_tasks: frozenset[str],
    replicas: Replicas,
    finished: FinishedParts | None,
) -> Any:
    if opened.diffusion:
        return DiffusionHarness(opened, options, greedy_tasks, replicas, finished)
    if is_gemma(opened.model):
        return GemmaHarness(opened, options, replicas=replicas, finished=finished)
    return AutoregressiveHarness(opened, options, replicas, finished)


def _transformers_settings(options: EvaluationOptions) -> dict[str, Any]:
    """Sampler settings under the harness's names, for autoregressive models."""
    given = merge_names(options.set)
    given.pop("seed", None)  # the harness sets all seeds
    if "max_new_tokens" in given:  # the first of the harness's names takes precedence; tasks use it
        given[LENGTHS[0]] = given.pop("max_new_tokens")
    if "temperature" in given:
        given["do_sample"] = given["temperature"] > 0
    return given


def _is_internal(error: Exception) -> bool:
    """True if an exception was raised by a model class of this package, not by the harness reading a task and its
    data. OSError, ValueError and KeyError describe invalid input."""
    if isinstance(error, (OSError, ValueError, KeyError)):
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(isinstance(frame.f_locals.get("self"), TemplateLM) for frame in frames)


def _documents(requests: Sequence[Instance]) -> Callable[[int], str]:
    """Return a function from the index of a request to the name of its document."""
    return [f"task {request.task_name}, document {request.doc_id}" for request in requests].__getitem__


def _is_harness_task(name: str) -> bool:
    return name not in LOCAL and not name.endswith((".yaml", ".yml"))


def _before(text: str, until: Sequence[str]) -> str:
    for stop in until:
        text = text.split(stop)[0] if stop else text
    return text
