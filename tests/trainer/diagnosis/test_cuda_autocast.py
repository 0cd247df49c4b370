"""CUDA's autocast rules, applied on a CPU."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.marks import looped
from trainer.diagnosis import cuda_autocast
from trainer.diagnosis.cuda_autocast import cudas_autocast

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def list_operations(macro):
    """Return the operations of a list in the header, as torch.ops names them."""
    [_, text] = HEADER.read_text().split(f"#define AT_FORALL_{macro}(_)")
    entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", re.split(r"\n(?!  )", text)[0])
    return {".".join(filter(None, entry)) for entry in entries}


@looped(
    "macro, names",
    [
        ("LOWER_PRECISION_FP", cuda_autocast.LOWER_PRECISION),
        ("FP32", cuda_autocast.FP32),
        ("FP32_SET_OPT_DTYPE", cuda_autocast.FP32_UNLESS_TOLD),
        ("PROMOTE", cuda_autocast.WIDEST),
    ],
)
def test_the_lists_are_those_of_the_torch_that_is_installed(macro, names):
    """The lists equal those in the header of the installed torch, where norm is separate."""
    assert {name for name in names if not name.startswith("norm")} == list_operations(macro)


def test_the_cpus_own_autocast_comes_back():
    """CUDA's rules run pow in fp32, and the CPU's own return afterwards."""
    half = torch.ones(3, dtype=torch.float16)

    def types():
        with torch.autocast("cpu", torch.float16):
            return half.pow(2).dtype, half.sum().dtype, F.mse_loss(half, half).dtype

    before = types()
    with cudas_autocast():
        assert types() == (torch.float32,) * 3
    assert types() == before == (torch.float16, torch.float16, torch.float32)


def test_explicit_dtypes_and_disabled_regions_are_respected():
    """Explicit dtypes and disabled regions prevent CUDA's autocast casts."""
    half = torch.ones(3, dtype=torch.float16)
    with cudas_autocast(), torch.autocast("cpu", torch.float16):
        assert half.softmax(0, dtype=torch.float16).dtype == torch.float16
        with torch.autocast("cpu", enabled=False):
            assert half.pow(2).dtype == torch.float16


@pytest.mark.parametrize("network", [torch.nn.LSTM, torch.nn.GRU])
def test_recurrent_networks_round_as_fp16_does(network):
    """Recurrent networks return fp16, with fp32 gradients of weights."""
    layer = network(4, 4)
    with cudas_autocast(), torch.autocast("cpu", torch.float16):
        outputs, _ = layer(torch.ones(2, 4))
    outputs.float().sum().backward()
    assert outputs.dtype == torch.float16
    assert layer.weight_ih_l0.grad.dtype == torch.float32
