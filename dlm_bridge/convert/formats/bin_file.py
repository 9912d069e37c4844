"""A Hub weight file as torch pickles it (`pytorch_model*.bin`): its tensors and their places. Nothing runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dlm_bridge.convert.formats.safetensors_file import SafetensorsFile, TensorEntry
from dlm_bridge.convert.formats.torch_file import FileTensor, read_torch_file
from dlm_bridge.convert.tensors import SAFETENSORS_NAMES, dtype_name
from dlm_bridge.errors import DlmBridgeError

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"


def read_bin(path: Path) -> SafetensorsFile:
    """The file's tensors in the order of their bytes, as a safetensors header would list them.

    Raises DlmBridgeError for what is not a state dict of weights, and as `read_torch_file` does.
    """
    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise DlmBridgeError(f"{path}: is not a dict of tensors")
    entries = []
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, FileTensor):
            raise DlmBridgeError(f"{path}: {name!r} is not a tensor: a weight file is a dict of tensors")
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise DlmBridgeError(f"{path}: tensor {name} has dtype {dtype_name(tensor.dtype)}, no weight's dtype")
        entries.append(TensorEntry(name, tensor.dtype, tensor.shape, tensor.offset))
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    return SafetensorsFile(path, None, tuple(entries), entries[0].offset if entries else 0)
