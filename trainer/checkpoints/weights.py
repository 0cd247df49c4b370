"""Writes .safetensors to any file object, byte for byte as the library does.

The library writes only to a path, so that its file would have to be read back to be hashed, or
builds the whole file in memory. The format is a length, a header in JSON, and the tensors' bytes.
Source: https://huggingface.co/docs/safetensors/index#format
"""

import json
import struct
from collections.abc import Mapping
from typing import BinaryIO

import safetensors.torch
import torch
from torch import Tensor

LENGTH = struct.Struct("<Q")
METADATA = {"format": "pt"}  # required by transformers and other readers


def write_weights(weights: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Write tensors from host memory, one after another.

    Tied tensors are written twice, because the format does not support shared memory.
    """
    header: dict[str, object] = {"__metadata__": METADATA}
    end = 0
    types = _types(weights)
    for name, type_ in types.items():
        start, end = end, end + weights[name].numel() * weights[name].element_size()
        shape = list(weights[name].shape)
        header[name] = {"dtype": type_, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH.size)
    file.write(LENGTH.pack(len(text)) + text)
    for name in types:
        file.write(weights[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _types(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return each tensor's type name in the library's order, the widest first."""
    nothing = {name: torch.empty(0, dtype=weight.dtype) for name, weight in weights.items()}
    written = safetensors.torch.save(nothing)
    (length,) = LENGTH.unpack_from(written)
    header = json.loads(written[LENGTH.size : LENGTH.size + length])
    return {name: fields["dtype"] for name, fields in header.items()}
