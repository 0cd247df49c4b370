"""Weights are written as the safetensors library writes them."""

import io

import safetensors.torch
import torch
from torch import nn

from tests.marks import looped
from trainer.checkpoints.weights import METADATA, write_weights

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def write(weights):
    """Return weights as written bytes."""
    file = io.BytesIO()
    write_weights(weights, file)
    return file.getvalue()


@looped(
    "weights",
    [
        {f"{number}.{kind}": torch.ones(number, 3).to(kind) for number in (2, 1) for kind in TYPES},
        {'"é\n': torch.tensor(1.5), "empty": torch.empty(0, 4), "x" * 300: torch.arange(5)},
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).state_dict(),
        {},
    ],
)
def test_the_bytes_are_the_librarys(weights):
    """The written bytes equal the safetensors library's for every dtype."""
    assert write(weights) == safetensors.torch.save(weights, METADATA)


def test_tied_and_strided_weights_are_written_out():
    """Tied and strided weights are written out, each name with its values in order."""
    weight = torch.arange(6.0).reshape(2, 3)
    weights = {"a": weight, "b": weight.t(), "c": weight[:, 1]}
    loaded = safetensors.torch.load(write(weights))
    assert all(torch.equal(loaded[name], weights[name]) for name in "abc")
