"""Chat templates of the installed TRL and of others' public texts, a tokenizer for each, and random chats."""

# ruff: noqa: RUF001  DeepSeek's marks
from __future__ import annotations

import importlib.util
import re
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.data.chats import said

EOS, BOS = "<|endoftext|>", "<|begin_of_text|>"
# What the published templates write, in short: LLaDA-8B-Base's and the first Llama 3's end with the assistant's header
# whatever they are asked for; OLMo 3's ends the last answer, and only that, with EOS.
PUBLISHED = {
    "llada_8b_base": (
        "{% for m in messages %}{% set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' "
        "+ m.content | trim + '<|eot_id|>' %}{{ bos_token + text if loop.first else text }}{% endfor %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    ),
    "bos_before_an_appended_header": (
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{{ '<|im_start|>assistant\n' }}"
    ),
    "olmo_3": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou have no functions.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role != 'assistant' or not loop.last %}<|im_end|>\n{% else %}{{ eos_token }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}{% endfor %}"
    ),
}  # fmt: skip
MULTIMODAL = ("idefics3", "llava_next", "smolvlm")  # content is a list of parts, of which a text is one
# Letters by role: which text a token is of shows in it.
LETTERS = {"system": "абвгд", "user": "αβγδε", "tool": "אבגדה", "assistant": "あいうえお"}
HEADERS = {
    "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<|turn>", "<|assistant|>",
    "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|system|>", "<｜User｜>", "<｜Assistant｜>",
}  # fmt: skip
# Templates that refuse, or do not write: systems' texts; calls of tools; calls of one kind.
NO_SYSTEM = ("gemma", "gemma_training")
NO_TOOLS = (
    "cohere", "deepseek_r1", "gemma3", "gemma_training", "lfm2_training", "llama3_training", "phi3", "qwen2_5_vl",
    "llada", "bos_before", "olmo_3",
)  # fmt: skip
NO_TOOLS_EITHER = ("gemma", "lfm2", "llama3")  # but later ones of the family do
SOME_TOOLS = ("deepseekv3", "gemma4", "diffusion_gemma")  # a call behind a tool's text; a call behind words
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "абв",
            "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "где"}}},
        },
    }
]


def trl_folder() -> Path:
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "chat_templates"


def templates() -> dict[str, str]:
    """Every template of texts, by name."""
    shipped = {file.stem: file.read_text("utf-8") for file in sorted(trl_folder().glob("*.jinja"))}
    return {name: text for name, text in shipped.items() if not name.startswith(MULTIMODAL)} | PUBLISHED


def marks(template: str) -> list[str]:
    """The marks that a template writes, which its own tokenizer has as special tokens."""
    found = re.findall(
        r"<\|[^<>|{}\s]+\|?>|<[a-z_]+\|>|<｜[^<>]+?｜>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>", template
    )
    return sorted({EOS, BOS, *found} - {"<|>"})


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and the template's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks(template)])
    built.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token=EOS, bos_token=BOS, chat_template=template)


def random_chat(random: Random, special: list[str]) -> dict[str, Any]:
    """A row: a system's text, tools, calls of them, thoughts, empty and repeated answers, marks in users' texts."""
    answers = [_text(random, "assistant") for _ in range(2)]
    messages: list[dict[str, Any]] = []
    if random.random() < 0.4:
        messages.append(said("system", _text(random, "system")))
    with_tools = random.random() < 0.4
    for _ in range(random.choice((1, 1, 2, 3))):
        asked = _text(random, "user")
        if random.random() < 0.3:
            asked += random.choice(special) + _text(random, "user")
        messages.append(said("user", asked))
        while with_tools and random.random() < 0.4:
            arguments = {"word": _text(random, "assistant")} if random.random() < 0.8 else {}
            call = {"type": "function", "id": "call00001", "function": {"name": "look_up", "arguments": arguments}}
            before = random.choice(("", "", None, answers[0]))
            messages.append({"role": "assistant", "content": before, "tool_calls": [call]})
            messages.append({**said("tool", _text(random, "tool")), "tool_call_id": "call00001"})
        answer: dict[str, Any] = {"role": "assistant", "content": random.choice((*answers, *answers, "", None))}
        if random.random() < 0.2 and answer["content"]:
            answer["content"] = f"<think>\n{answers[0]}\n</think>\n\n{answer['content']}"
        messages.append(answer)
    return {"messages": messages} | ({"tools": TOOLS} if with_tools else {})


def _text(random: Random, role: str) -> str:
    letters = LETTERS[role]
    words = ("".join(random.choices(letters, k=random.randint(3, 5))) for _ in range(random.randint(2, 4)))
    return random.choice((" ", "\n", " ")).join(words)


def refusable(name: str, row: dict[str, Any]) -> bool:
    """True where the template cannot write such a chat, or not so that answers can be told from the rest."""
    if name in NO_SYSTEM and row["messages"][0]["role"] == "system":
        return True
    without = name.startswith(NO_TOOLS) or name in NO_TOOLS_EITHER or name.startswith(SOME_TOOLS)
    return without and any("tool_calls" in message for message in row["messages"])


def problems(name: str, example: Any, row: dict[str, Any], tokenizer: Any, special: set[str]) -> list[str]:
    """What of an encoded chat is trained though it must not be, and what is not though it must."""
    runs = [
        (trained, [token for token, _ in run])
        for trained, run in groupby(zip(example.input_ids, example.answer, strict=True), key=lambda pair: pair[1])
    ]
    texts = [tokenizer.decode(run) for trained, run in runs if trained]
    rest = "".join(tokenizer.decode(run) for trained, run in runs if not trained)
    found = [
        f"text of {role} is trained"
        for role in ("system", "user", "tool")
        if any(letter in text for text in texts for letter in LETTERS[role])
    ]
    if any(letter in rest for letter in LETTERS["assistant"]):
        found.append("a part of an answer is not trained")
    if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        return found  # the template itself says which headers and ends are trained
    if any(mark in text for mark in HEADERS for text in texts):
        found.append("a header is trained")
    if len(texts) != sum(message["role"] == "assistant" for message in row["messages"]):
        found.append("answers and trained runs differ in number")
    ended = texts[-1:] if name == "glm4moe" else texts  # GLM's ends no answer: the last gets the stop token
    if not all(text.rstrip().endswith(tuple(special)) for text in ended):
        found.append("the end of an answer is not trained")
    return found
