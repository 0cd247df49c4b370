"""What makes a training repeat itself bit for bit: seeds, and the choice of algorithms."""

import os
import random
import struct
import zlib

import numpy as np
import torch
import torch.utils.deterministic


def make_deterministic(wanted: bool) -> None:
    """Choose algorithms that repeat themselves bit for bit, or the fastest ones."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.benchmark = not wanted
    # Filling every new tensor with NaN finds bugs, and costs a kernel a tensor: not here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_fp32(*, tf32: bool) -> None:
    """Let CUDA's fp32 products and convolutions be TF32, or not: torch's defaults disagree."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def seed_everything(seed: int) -> None:
    """Seed every global generator that a recipe may draw from, on host and device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_of_place(purpose: bytes, seed: int, place: int) -> int:
    """Return 32 bits, of a run's seed and a place in its stream of examples.

    As many as a CPU generator uses; the checksum spreads both over all of them.
    """
    return zlib.crc32(purpose + struct.pack("<qq", seed, place))
