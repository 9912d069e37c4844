"""Sound inputs of every kind that a command opens, and the commands that open them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.autoregressive.published import LLAMA_32
from tests.checkpoints import standard_tensors, write_hub_folder, write_llada, write_tokenizer

MASK, EOS, VOCABULARY = 259, 258, 272
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<eos>",
    "mask_token": "<mask>",
    "pad_token": "<eos>",
    "clean_up_tokenization_spaces": False,
    "chat_template": TEMPLATE,
}
IDS = {"mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS}
LLADA = {
    "vocab_size": VOCABULARY,
    "embedding_size": VOCABULARY,
    "d_model": 16,
    "n_heads": 2,
    "n_kv_heads": 2,
    "n_layers": 2,
    "mlp_hidden_size": 32,
    "max_sequence_length": 64,
}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
# One short run of a training command.
BATCH = ("--global-batch-size", "2", "--seq-length", "32")
TWO_STEPS = ("--steps", "2", *BATCH, "--save-interval", "1", "--eval-interval", "0")
SHORT = ("--output", "{out}", *TWO_STEPS)
GENERATE = ("generate", "{it}", "--prompt", "the", "--gen-length", "4")
CHAT = ("generate", "{it}", "--chat", "--prompt", "the", "--gen-length", "4", "--json")
PERPLEXITY = ("eval", "{it}", "--perplexity", "{text}", "--limit", "2", "--window", "16", "--mc-samples", "1")
TASKS = ("eval", "{it}", "--tasks", "sums,orders", "--limit", "2", "--mc-samples", "1")
# These run until they are interrupted: once they listen, `serve` is sent the requests of {requests}.
SERVE = ("serve", "{it}", "--port", "{port}", "--timeout", "20", "--set", "gen_length=8")
APP = ("app", "{it}", "--port", "{port}")
PRETRAIN = ("pretrain", "--model", "{it}", "--data", "{text}", *SHORT)
SFT = ("sft", "--model", "{it}", "--data", "{chats}", *SHORT)
OF_ANY_MODEL = (
    GENERATE,
    CHAT,
    PERPLEXITY,
    TASKS,
    (*TASKS, "--chat", "--json", "--output", "{out}"),
    SERVE,
    APP,
    ("chat", "{it}"),
    PRETRAIN,
    SFT,
    (*PRETRAIN, "--dry-run"),
    ("plan", "{it}", "--gpus", "2", "--seq-length", "32"),
    ("plan", "{it}", "--gpus", "2", "--seq-length", "32", "--recommend", "--json"),
    ("inspect", "{it}"),
    ("inspect", "{it}", "--json"),
    ("verify", "{it}"),
)
OF_A_HUB_FOLDER = (
    *OF_ANY_MODEL,
    ("sft", "--model", "{it}", "--data", "{chats}", "--lora-rank", "2", *SHORT),
    ("pretrain", "--from-scratch", "--model", "{it}", "--data", "{text}", *SHORT),
    ("pretrain", "--engine", "megatron", "--model", "{it}", "--data", "{text}", *SHORT),
    ("import", "{it}", "{out}", "--tp", "2"),
    ("push", "{it}", "me/model", "--dry-run"),
    ("preprocess", "{text}", "--tokenizer", "{it}", "--output", "{out}", "--workers", "1"),
)
EXPORT = ("export", "{it}", "{out}")
OF_A_QUANTISED_FOLDER = (
    GENERATE,
    PERPLEXITY,
    SERVE,
    SFT,
    EXPORT,
    ("import", "{it}", "{out}", "--tp", "2"),
    ("push", "{it}", "me/model", "--dry-run"),
    ("plan", "{it}", "--gpus", "2", "--seq-length", "32"),
    ("inspect", "{it}"),
    ("verify", "{it}"),
)
VRPO = ("rl", "--method", "vrpo", "--data", "{pairs}", *SHORT)
REWARD = ("--reward", "{reward}:short", "--gen-length", "8", "--group-size", "2")
TRACED = ("--method", "tracerl", "--value-model", "--trace-steps", "1", "--sharding", "fsdp")
GRPO = ("rl", "--method", "diffu-grpo", "--data", "{prompts}", *SHORT, *REWARD)


Run = Callable[[tuple[str, ...]], None]


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Args:
        build: `build(root, target, run)` makes a sound one at `target`. `run(words)` runs a command in a process of
            its own, and `root` holds the other kinds.
        commands: the words of every command that opens it; `{it}` is the damaged copy, `{out}` an output, `{NAME}` the
            sound input of another kind.
        weights: pattern of its weight files.
        needs: the kinds that it is made of or read with.
        rounds: how often a copy is damaged.
    """

    build: Callable[[Path, Path, Run], None]
    commands: tuple[tuple[str, ...], ...]
    weights: str = "*.safetensors"
    needs: tuple[str, ...] = ()
    rounds: int = 1


def _diffusion(_: Path, target: Path, __: Run) -> None:
    write_llada(target, **LLADA, **IDS)
    write_tokenizer(target, TOKENIZER)


def _llama(_: Path, target: Path, __: Run) -> None:
    config: dict[str, Any] = {**LLAMA_32, **LLAMA}
    write_hub_folder(target, config, standard_tensors(config), shards=1)
    write_tokenizer(target, TOKENIZER)


def _pickled(root: Path, target: Path, _: Run) -> None:
    """The Llama's weights in two of torch's files."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(root / "llama", target)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    weight_map = {name: f"pytorch_model-0000{place % 2 + 1}-of-00002.bin" for place, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name in tensors if weight_map[name] == file}, target / file)
    index = {"metadata": {"total_size": sum(each.nbytes for each in tensors.values())}, "weight_map": weight_map}
    (target / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _quantised(scheme: str) -> Callable[[Path, Path, Run], None]:
    """LLaDA for int8; wide enough for groups of 128 input channels for int4."""

    def build(root: Path, target: Path, run: Run) -> None:
        source = root / "diffusion"
        if scheme == "int4":
            source = root / "wide"
            write_llada(source, **{**LLADA, "d_model": 128, "mlp_hidden_size": 128}, **IDS)
            write_tokenizer(source, TOKENIZER)
        run(("export", str(source), str(target), "--quantize", scheme))

    return build


def _quantised_experts(root: Path, target: Path, run: Run) -> None:
    """gpt-oss, whose experts are matrices of their own in a quantised folder only."""
    from tests.autoregressive.cases import CASES

    case = next(case for case in CASES if case.label == "gpt-oss")
    ids = {"vocab_size": VOCABULARY, "bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": EOS}
    source = case.write(root / "experts", **ids)
    write_tokenizer(source, TOKENIZER)
    run(("export", str(source), str(target), "--quantize", "fp8"))


def _adapter(root: Path, target: Path, run: Run) -> None:
    model, data, output = (str(root / name) for name in ("llama_dlm", "chats.jsonl", "adapter_run"))
    run(("sft", "--model", model, "--data", data, "--lora-rank", "2", "--steps", "1", *BATCH, "--output", output))
    shutil.copytree(root / "adapter_run" / "checkpoints" / "step-0000001", target)


def _to_dlm(root: Path, target: Path, run: Run) -> None:
    run(("convert-to-dlm", str(root / "llama"), str(target)))


def _megatron(root: Path, target: Path, run: Run) -> None:
    run(("import", str(root / "diffusion"), str(target), "--tp", "2"))


def _legacy(root: Path, target: Path, run: Run) -> None:
    run(("import", str(root / "llama"), str(target), "--tp", "2", "--format", "torch"))


def _megatron_adapter(root: Path, target: Path, run: Run) -> None:
    run(("adapter", "import", str(root / "adapter"), str(target), "--base", str(root / "llama_dlm")))


def _run(engine: str) -> Callable[[Path, Path, Run], None]:
    def build(root: Path, target: Path, run: Run) -> None:
        model, data = str(root / "diffusion"), str(root / "text.txt")
        run(("pretrain", "--engine", engine, "--model", model, "--data", data, "--output", str(target), *TWO_STEPS))

    return build


def _pickled_adapter(root: Path, target: Path, _: Run) -> None:
    import torch
    from safetensors.torch import load_file

    shutil.copytree(root / "adapter", target)
    torch.save(load_file(target / "adapter_model.safetensors"), target / "adapter_model.bin")
    (target / "adapter_model.safetensors").unlink()


def _sharded_run(root: Path, target: Path, run: Run) -> None:
    """A run whose optimizer's state is torch's distributed checkpoint."""
    source = ("--model", str(root / "diffusion"), "--data", str(root / "text.txt"), "--sharding", "fsdp")
    run(("pretrain", *source, "--output", str(target), *TWO_STEPS))


def _rl_run(root: Path, target: Path, run: Run) -> None:
    source = ("--model", str(root / "diffusion"), "--data", str(root / "prompts.jsonl"))
    reward = (f"{root / 'reward.py'}:short", *REWARD[2:])
    run(("rl", *TRACED, *source, "--reward", *reward, "--output", str(target), *TWO_STEPS))


def _local_run(root: Path, target: Path, run: Run) -> None:
    """A run that ended between two checkpoints, with a local one that is newer than the last."""
    source = ("--model", str(root / "diffusion"), "--data", str(root / "text.txt"), "--output", str(target))
    local = ("--engine", "megatron", "--local-folder", str(target / "local"), "--local-interval", "2")
    run(("pretrain", *source, *local, "--steps", "3", *BATCH, "--save-steps", "1", "--eval-interval", "0"))
    shutil.rmtree(target / "checkpoints" / "iter_0000003")
    (target / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")


def _dcp(root: Path, target: Path, _: Run) -> None:
    """What torch's own writer saves of a Hub model: weights, and values as objects."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    state = {"model": load_file(root / "llama" / "model.safetensors"), "iteration": 3, "words": ["a"]}
    dcp.save(state, checkpoint_id=target, no_dist=True)


def _saved(root: Path, target: Path, _: Run) -> None:
    import datasets

    datasets.Dataset.from_json(str(root / "rows.jsonl"), cache_dir=str(root / "home")).save_to_disk(target)


def _data(root: Path, target: Path, run: Run) -> None:
    """One folder with a file of every format."""
    import pyarrow
    import pyarrow.parquet

    target.mkdir()
    for name in ("text.txt", "chats.jsonl", "prompts.jsonl", "pairs.jsonl", "rows.jsonl"):
        shutil.copyfile(root / name, target / name)
    rows = [json.loads(line) for line in (root / "rows.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target / "rows.parquet")
    data, tokenizer, output = str(root / "text.txt"), str(root / "diffusion"), str(target / "pair")
    run(("preprocess", data, "--tokenizer", tokenizer, "--output", output, "--workers", "1"))


def _conversations(root: Path, target: Path, _: Run) -> None:
    """Chats with tools in every container, and chat templates: one that marks answers, one that only says where they
    begin, one that always ends with a header, and one that takes arguments as text."""
    from tests.data.test_answers import write_containers

    target.mkdir()
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1, "y": None}}}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the"}]
    called = [said[0], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    rows = [{"messages": said}, {"messages": [*called, said[1]]}, {"messages": [*said, *said]}]
    write_containers(target, rows * 4)
    body = "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ eos_token }}"
    loop = "{% for m in messages %}{{ m.role }}:"
    prompt = "{% if add_generation_prompt %}assistant:{% endif %}"
    text = "{% for call in m.tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}"
    templates = {
        "marked": loop + "{% generation %}" + body + "{% endgeneration %}{% endfor %}",
        "plain": loop + body + "{% endfor %}" + prompt,
        "appended": loop + body + "{% endfor %}{{ 'assistant:' }}",
        "text": loop + "{{ m.content }}" + text + "\n{% endfor %}" + prompt,
    }
    for name, template in templates.items():
        (target / f"{name}.jinja").write_text(template)


def _requests(root: Path, target: Path, _: Run) -> None:
    """Many of each request: one command reads them all."""
    target.mkdir()
    for request in (root / "requests").iterdir():
        for number in range(5):
            shutil.copyfile(request, target / f"{request.stem}-{number}.json")


def _tasks(root: Path, target: Path, __: Run) -> None:
    """The local tasks, as files that a user writes, with their data where a case's copy of them is."""
    from dlm_bridge.evaluation.harness import FOLDER, LOCAL, local_task

    target.mkdir()
    for name in LOCAL:
        shutil.copyfile(FOLDER / f"{name}.jsonl", target / f"{name}.jsonl")
        data = {"data_files": {"test": str(root / "case" / "it" / f"{name}.jsonl")}}
        config = {**local_task(name), "task": f"own_{name}", "dataset_kwargs": data}
        (target / f"{name}.yaml").write_text(json.dumps(config, indent=1))  # JSON is YAML


def _resume(engine: str, *more: str) -> tuple[str, ...]:
    source = ("--model", "{diffusion}", "--data", "{text}")
    return ("pretrain", "--engine", engine, *source, "--resume", "--output", "{it}", "--steps", "3", *BATCH, *more)


CONTAINERS = (
    "rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.csv", "rows.parquet", "json.parquet", "saved", "saved_json",
)  # fmt: skip
PREVIEWED = ("--preview", "4", "--json", "--seq-length", "64", "--chat-template")
UPCYCLE = ("upcycle", "{it}", "{out}", "--experts", "2")
KINDS: dict[str, Kind] = {
    "diffusion": Kind(
        _diffusion,
        (
            *OF_A_HUB_FOLDER,
            (*VRPO, "--model", "{it}"),
            (*GRPO, "--model", "{it}"),
            ("verify", "{diffusion}", "{it}", "--logits"),
            *((*EXPORT, "--quantize", scheme) for scheme in ("fp8", "int8")),
            *((*EXPORT, "--to", "gguf", *words) for words in ((), ("--quantize", "q8_0"))),
            (*GENERATE, "--quantize", "fp8"),
        ),
    ),
    "quantised": Kind(
        _quantised("int8"),
        (
            *OF_A_QUANTISED_FOLDER,
            ("verify", "{it}", "--against", "{diffusion}"),
            ("verify", "{it}", "--against", "{diffusion}", "--logits"),
            ("verify", "{diffusion}", "--against", "{it}"),
        ),
        needs=("diffusion",),
    ),
    "quantised_int4": Kind(_quantised("int4"), OF_A_QUANTISED_FOLDER),
    "quantised_experts": Kind(_quantised_experts, OF_A_QUANTISED_FOLDER),
    "llama": Kind(_llama, (*OF_A_HUB_FOLDER, ("convert-to-dlm", "{it}", "{out}"), UPCYCLE)),
    "pickled": Kind(_pickled, (*OF_A_HUB_FOLDER, ("convert-to-dlm", "{it}", "{out}")), "*.bin", ("llama",)),
    "llama_dlm": Kind(_to_dlm, (GENERATE, SFT, SERVE), needs=("llama",)),
    "adapter": Kind(
        _adapter,
        (
            GENERATE,
            CHAT,
            PERPLEXITY,
            SERVE,
            ("push", "{it}", "me/model", "--dry-run"),
            ("adapter", "import", "{it}", "{out}", "--base", "{llama_dlm}"),
            ("adapter", "export", "{it}", "{out}", "--base", "{llama_dlm}", "--merge"),
            ("sft", "--model", "{llama_dlm}", "--adapter", "{it}", "--data", "{chats}", *SHORT),
            ("distill", "--model", "{llama_dlm}", "--adapter", "{it}", "--data", "{chats}", *SHORT),
            ("inspect", "{it}"),
        ),
        needs=("llama_dlm",),
    ),
    "torch_dist": Kind(
        _megatron,
        (
            *OF_ANY_MODEL,
            ("export", "{it}", "{out}"),
            ("reshard", "{it}", "{out}", "--pp", "2"),
            ("verify", "{diffusion}", "{it}"),
            ("verify", "{diffusion}", "{it}", "--logits"),
            ("pretrain", "--engine", "megatron", "--model", "{it}", "--data", "{text}", *SHORT),
        ),
        "*.distcp",
        ("diffusion",),
    ),
    "legacy": Kind(
        _legacy,
        (
            GENERATE,
            ("export", "{it}", "{out}"),
            ("reshard", "{it}", "{out}", "--tp", "1"),
            ("inspect", "{it}"),
            ("verify", "{it}"),
            ("plan", "{it}", "--gpus", "2", "--seq-length", "32"),
        ),
        "model_optim_rng.pt",
        ("llama",),
    ),
    "megatron_adapter": Kind(
        _megatron_adapter,
        (("adapter", "export", "{it}", "{out}", "--base", "{llama_dlm}"),),
        "*.distcp",
        ("adapter", "llama_dlm"),
    ),
    "run_accelerate": Kind(
        _run("accelerate"),
        (
            _resume("accelerate"),
            (*_resume("accelerate"), "--dry-run"),
            GENERATE,
            ("verify", "{it}"),
            ("inspect", "{it}"),
            ("import", "{it}", "{out}"),
        ),
        needs=("diffusion",),
    ),
    "run_megatron": Kind(
        _run("megatron"),
        (
            _resume("megatron"),
            (*_resume("megatron"), "--dry-run"),
            GENERATE,
            ("verify", "{it}"),
            ("export", "{it}", "{out}"),
        ),
        "*.distcp",
        ("diffusion",),
    ),
    "pickled_adapter": Kind(
        _pickled_adapter,
        (
            GENERATE,
            SERVE,
            ("push", "{it}", "me/model", "--dry-run"),
            ("adapter", "import", "{it}", "{out}", "--base", "{llama_dlm}"),
            ("adapter", "export", "{it}", "{out}", "--base", "{llama_dlm}", "--merge"),
            ("sft", "--model", "{llama_dlm}", "--adapter", "{it}", "--data", "{chats}", *SHORT),
            ("distill", "--model", "{llama_dlm}", "--adapter", "{it}", "--data", "{chats}", *SHORT),
            ("inspect", "{it}"),
        ),
        "*.bin",
        ("adapter", "llama_dlm"),
    ),
    "run_sharded": Kind(
        _sharded_run,
        (
            _resume("accelerate", "--sharding", "fsdp"),
            _resume("accelerate"),
            (*_resume("accelerate"), "--dry-run"),
            GENERATE,
            ("verify", "{it}"),
            ("inspect", "{it}"),
        ),
        "*.distcp",
        ("diffusion",),
    ),
    "run_rl": Kind(
        _rl_run,
        (
            (
                "rl",
                *TRACED,
                *REWARD,
                "--model",
                "{diffusion}",
                "--data",
                "{prompts}",
                "--resume",
                "--output",
                "{it}",
                "--steps",
                "3",
                *BATCH,
            ),
            GENERATE,
            ("verify", "{it}"),
        ),
        "*.distcp",
        ("diffusion",),
    ),
    "run_local": Kind(
        _local_run,
        (_resume("megatron", "--local-folder", "{it}/local", "--local-interval", "2"), GENERATE),
        "state.pt",
        ("diffusion",),
    ),
    "dcp": Kind(
        _dcp,
        (
            ("export", "{it}", "{out}", "--like", "{llama}"),
            ("reshard", "{it}", "{out}", "--tp", "2", "--like", "{llama}"),
            ("inspect", "{it}"),
            ("verify", "{it}", "{llama}"),
        ),
        "*.distcp",
        ("llama",),
    ),
    "saved": Kind(
        _saved,
        (
            ("pretrain", "--model", "{diffusion}", "--data", "{it}", *SHORT),
            ("sft", "--model", "{diffusion}", "--data", "{it}", *SHORT),
            ("preprocess", "{it}", "--tokenizer", "{diffusion}", "--output", "{out}", "--workers", "1"),
            ("eval", "{diffusion}", "--perplexity", "{it}", *PERPLEXITY[4:]),
        ),
        "*.arrow",
        ("diffusion",),
    ),
    "data": Kind(
        _data,
        (
            ("pretrain", "--model", "{diffusion}", "--data", "{it}/text.txt", *SHORT),
            ("pretrain", "--model", "{diffusion}", "--data", "{it}/rows.jsonl", *SHORT),
            ("pretrain", "--model", "{diffusion}", "--data", "{it}/rows.parquet", *SHORT),
            ("pretrain", "--model", "{diffusion}", "--data", "{it}/pair", *SHORT),
            ("sft", "--model", "{diffusion}", "--data", "{it}/chats.jsonl", *SHORT),
            (*VRPO[:4], "{it}/pairs.jsonl", *VRPO[5:], "--model", "{diffusion}"),
            (*GRPO[:4], "{it}/prompts.jsonl", *GRPO[5:], "--model", "{diffusion}"),
            ("preprocess", "{it}/rows.jsonl", "--tokenizer", "{diffusion}", "--output", "{out}", "--workers", "1"),
            ("preprocess", "{it}/rows.parquet", "--tokenizer", "{diffusion}", "--output", "{out}", "--workers", "1"),
            ("generate", "{diffusion}", "--jsonl", "{it}/prompts.jsonl", "--gen-length", "4"),
            ("eval", "{diffusion}", "--perplexity", "{it}/text.txt", *PERPLEXITY[4:]),
        ),
        "pair.*",
        ("diffusion",),
    ),
    "conversations": Kind(
        _conversations,
        tuple(
            ("sft", "--model", "{diffusion}", "--data", f"{{it}}/{rows}", *options, f"{{it}}/{template}.jinja")
            for rows in CONTAINERS
            for template in ("marked", "plain", "appended", "text")
            for options in (PREVIEWED, (*SHORT, "--truncate", "--chat-template"))
        ),
        needs=("diffusion",),
    ),
    "damaged_requests": Kind(
        _requests,
        tuple(("serve", model, *SERVE[2:]) for model in ("{diffusion}", "{llama}")),
        needs=("diffusion", "llama"),
        rounds=30,
    ),
    "tasks": Kind(
        _tasks,
        tuple(
            ("eval", model, "--tasks", f"{{it}}/{name}.yaml", *TASKS[4:])
            for model in ("{diffusion}", "{llama}")
            for name in ("sums", "orders")
        ),
        "*.yaml",
        ("diffusion", "llama"),
    ),
}
# The command that reads every pickle of a folder that has any.
RESTORES = {
    "pickled": "import",
    "pickled_adapter": "generate",
    "torch_dist": "export",
    "legacy": "export",
    "run_accelerate": "pretrain",
    "run_sharded": "pretrain",
    "run_rl": "rl",
    "run_megatron": "pretrain",
    "run_local": "pretrain",
    "dcp": "export",
    "saved": "pretrain",
}

MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": [{"type": "text", "text": "is"}]}]
# By route, with "." for "/".
REQUESTS: dict[str, dict[str, Any]] = {
    "completions": {
        "prompt": "the", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 1, "n": 2,
        "stop": ["a", "b"], "logit_bias": {}, "echo": False, "repetition_penalty": 1.1, "suppress_tokens": [5],
    },
    "completions-plain": {"prompt": "the", "max_tokens": 4},
    "completions-tokens": {
        "prompt": [[5, 6], [7]], "max_tokens": 4, "bad_words_ids": [[5], [6, 7]], "min_new_tokens": 1,
    },
    "completions-stream": {
        "prompt": ["a", "b"], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True},
    },
    "chat.completions": {
        "model": "x", "messages": MESSAGES, "max_completion_tokens": 4, "user": "me", "tools": [], "top_logprobs": 0,
        "response_format": {"type": "text"}, "eos_token_id": EOS, "no_repeat_ngram_size": 2,
    },
    "chat.completions-tools": {
        "messages": MESSAGES, "max_tokens": 64, "logprobs": True, "top_logprobs": 2, "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
        "parallel_tool_calls": False,
    },
    "completions-regex": {"prompt": "the", "max_tokens": 8, "structured_outputs": {"regex": "a{2,6}"}, "dlm": True},
    "chat.completions-config": {
        "messages": MESSAGES, "stream": True,
        "generation_config": {"max_new_tokens": 4, "temperature": 1.0, "do_sample": True, "pad_token_id": EOS},
    },
    "commits": {
        "prompt": "the", "max_tokens": 4, "steps": 2, "block_length": 4, "remasking": "random", "threshold": 0.5,
    },
    "commits-chat": {"messages": MESSAGES, "max_tokens": 4, "cfg_scale": 0.5, "algorithm": "llada", "cache": "prefix"},
}  # fmt: skip


def write_data(root: Path) -> None:
    """The sound data that commands on models read."""
    lines = [f"the {number} cats and the dogs of the house" for number in range(40)]
    (root / "text.txt").write_text("\n".join(lines) + "\n")
    reward = "def short(prompts, completions, rows):\n    return [-len(text) for text in completions]\n"
    (root / "reward.py").write_text(reward)
    rows = {
        "rows": [{"text": line} for line in lines],
        "prompts": [{"prompt": line[:8]} for line in lines[:3]],
        "pairs": [{"prompt": "the", "chosen": " cat", "rejected": " dog"} for _ in lines[:6]],
        "chats": [
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the"}]} for _ in lines
        ],
    }
    (root / "requests").mkdir(exist_ok=True)
    for name, request in REQUESTS.items():
        (root / "requests" / f"{name}.json").write_text(json.dumps(request))
    for name, content in rows.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
