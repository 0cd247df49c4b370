"""Weights as .safetensors, byte for byte what the library writes, into any file.

The library writes to a path alone, so that its file would have to be read back to be hashed, or
makes all of it in memory. The format is a length, a header in JSON, and the tensors' bytes.
Source: https://huggingface.co/docs/safetensors/index#format
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

LENGTH = struct.Struct("<Q")
METADATA = {"format": "pt"}  # what transformers and others look for before they read on


def write_weights(weights: Mapping[str, Tensor], file: Any) -> None:
    """Write tensors that lie in host memory, one after another.

    Tied ones are there twice, for the format holds no two names of one memory.
    """
    header: dict[str, Any] = {"__metadata__": METADATA}
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
    """Return the type of each tensor, in the library's words and in its order: widest first."""
    nothing = {name: torch.empty(0, dtype=weight.dtype) for name, weight in weights.items()}
    written = safetensors.torch.save(nothing)
    (length,) = LENGTH.unpack_from(written)
    header = json.loads(written[LENGTH.size : LENGTH.size + length])
    return {name: fields["dtype"] for name, fields in header.items()}
