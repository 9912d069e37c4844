"""verify, with the manifest alone, sees one changed bit in any file, and names the file or a tensor in it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.verify import verify_manifest
from tests.checkpoints import write_llada

pytestmark = pytest.mark.slow
FLIPS = 12  # in each file


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Megatron and a Hub checkpoint of a model with a padded vocabulary, tokenizer files and remote code."""
    folder = tmp_path_factory.mktemp("written")
    source = write_llada(folder / "source", n_kv_heads=2, n_layers=2, vocab_size=120, embedding_size=120)
    (source / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    Bridge.from_hf(source).to_megatron(folder / "m", Layout(tp=2, pp=2), vocab_multiple=32)
    Bridge.from_megatron(folder / "m").to_hf(folder / "hub", "bf16")
    Bridge.from_megatron(folder / "m").to_hf(folder / "split", shard_size=200_000)
    return {name: folder / name for name in ("m", "hub", "split")}


def told(root: Path, file: str) -> str:
    """Output of verify for a damaged checkpoint: name, kind and detail of each difference, or the error."""
    try:
        verdict = verify_manifest(root, workers=1)
    except DlmBridgeError as error:
        return str(error)
    assert not verdict.equal, f"a change in {file} is not seen"
    return "\n".join(f"{item.name} {item.kind} {item.detail}" for item in verdict.differences)


@pytest.mark.parametrize("kind", ["m", "hub", "split"])
def test_a_changed_bit_anywhere_is_seen(written: dict[str, Path], kind: str) -> None:
    root = written[kind]
    assert verify_manifest(root).equal
    chance = random.Random(kind)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    expected = {
        "config.json",
        "tokenizer.json",
        "dlm_bridge.json",
        *((".metadata", "common.pt") if kind == "m" else ()),
    }
    assert expected <= {file.name for file in files}
    tensors = set(Bridge.from_megatron(root).hub_names() if kind == "m" else Bridge.from_hf(root).hub_names())
    for file in files:
        data = file.read_bytes()
        places = [0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(FLIPS))]
        for place in places:
            changed = bytearray(data)
            changed[place] ^= 1 << chance.randrange(8)
            file.write_bytes(changed)
            words = told(root, file.name)
            named = [name for name in (file.name, *tensors) if name in words]
            assert named or "iter_" in words, f"bit in byte {place} of {file.name}: {words}"
            file.write_bytes(data)
    assert verify_manifest(root).equal
