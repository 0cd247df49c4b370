"""Bit-for-bit repeatability of training: seeds, and the choice of algorithms."""

import os
import random
import struct
import zlib

import numpy as np
import torch
import torch.utils.deterministic


def make_deterministic(enabled: bool) -> None:
    """Choose deterministic algorithms, or the fastest ones."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.benchmark = not enabled
    # Filling new tensors with NaN finds bugs, but costs a kernel per tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def choose_fp32(*, tf32: bool) -> None:
    """Enable or disable TF32 for fp32 products and convolutions: torch's defaults differ."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def seed_everything(seed: int) -> None:
    """Seed every global generator that a recipe may use, on host and device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_of_place(purpose: bytes, seed: int, place: int) -> int:
    """Return a 32-bit seed from a run's seed and a position in its stream of examples.

    A CPU generator uses 32 bits; the checksum spreads both inputs over all of them.
    """
    return zlib.crc32(purpose + struct.pack("<qq", seed, place))
