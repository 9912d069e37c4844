"""Memory follows the largest tensor, not the model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.checkpoints import llada_config

LAYERS, HIDDEN, FFN, VOCAB = 6, 1024, 4096, 4096
MODEL = 4 * LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)  # bytes: 0.4 GB of fp32

SCRIPT = """
import json, resource, sys
from dlm_bridge import Bridge, Layout

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

hub, folder = sys.argv[1:]
before = peak()
Bridge.from_hf(hub).to_megatron(folder + "/m", Layout(tp=2, pp=2), workers=1)
Bridge.from_megatron(folder + "/m").to_hf(folder + "/out", workers=1)
print(json.dumps([before, peak()]))
"""


def write_sparse(folder: Path) -> Path:
    """A checkpoint of zeros that takes no space on the disk: the header, then a hole."""
    folder.mkdir()
    config = llada_config(
        d_model=HIDDEN,
        n_heads=8,
        n_kv_heads=8,
        n_layers=LAYERS,
        mlp_hidden_size=FFN,
        vocab_size=VOCAB,
        embedding_size=VOCAB,
    )
    (folder / "config.json").write_text(json.dumps(config))
    root, shapes = "model.transformer.", {}
    shapes[root + "wte.weight"] = shapes[root + "ff_out.weight"] = [VOCAB, HIDDEN]
    shapes[root + "ln_f.weight"] = [HIDDEN]
    for layer in range(LAYERS):
        block = f"{root}blocks.{layer}."
        shapes |= {f"{block}{name}.weight": [HIDDEN] for name in ("attn_norm", "ff_norm")}
        shapes |= {f"{block}{name}.weight": [HIDDEN, HIDDEN] for name in ("q_proj", "k_proj", "v_proj", "attn_out")}
        shapes |= {f"{block}{name}.weight": [FFN, HIDDEN] for name in ("ff_proj", "up_proj")}
        shapes[f"{block}ff_out.weight"] = [HIDDEN, FFN]
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + position)
    return folder


def test_peak_memory_stays_far_below_the_model(tmp_path: Path) -> None:
    hub = write_sparse(tmp_path / "hub")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(hub), str(tmp_path)], check=True, capture_output=True, text=True
    )
    before, after = json.loads(result.stdout)
    for name in ("m", "out"):
        shutil.rmtree(tmp_path / name)
    assert after - before < 150e6 < MODEL / 2
