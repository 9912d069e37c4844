"""The prefix cache of a server: a known prompt gives the same text, and /metrics counts it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import httpx

from dlm_bridge.loading import Placement, load_model
from dlm_bridge.prefix_cache.prompts import PromptCache
from tests.cli.conftest import EOS, MASK, TOKENIZER
from tests.families.sdar import CASES
from tests.serving.conftest import running


def test_a_repeated_prompt_is_not_computed_again(tmp_path: Path) -> None:
    sizes = {"vocab_size": 272, "mask_token_id": MASK, "eos_token_id": EOS, "max_position_embeddings": 512}
    case = replace(CASES[0], config=CASES[0].config | sizes, tokenizer=TOKENIZER)
    loaded = load_model(case.write(tmp_path / "sdar"), Placement("cpu"))
    prompts = PromptCache(loaded.model, prefix_cache=2**-10, prefill_chunk=64)
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with running(loaded, prompts=prompts) as server:

        def ask(prompt: str) -> str:
            answer = httpx.post(f"{server.address}/v1/completions", json=body | {"prompt": prompt}, timeout=60)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        def count(name: str) -> float:
            text = httpx.get(f"{server.address}/metrics").text
            (found,) = re.findall(rf"^dlm_bridge_prefix_cache_{name} (\S+)$", text, re.MULTILINE)
            return float(found)

        question = "a longer question, with more than one page of letters: "
        first = ask(question)
        assert first == server.alone(question, gen_length=40, temperature=0.0, eos_token_id=None)
        assert count("hits_total") == 0
        stored = count("bytes")
        assert 0 < stored < count("capacity_bytes")
        assert ask(question) == first
        assert count("hits_total") == 1
        assert count("requests_total") == 2
        assert count("hit_tokens_total") == 32
        assert count("prompt_tokens_total") == 2 * len(loaded.tokenizer(question)["input_ids"])
        assert count("evictions_total") == 0
