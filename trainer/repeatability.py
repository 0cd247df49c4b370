"""Bit-for-bit repeatability of training: seeds, and the choice of algorithms."""

import os
import random
import struct
import zlib

import numpy as np
import torch
import torch.utils.deterministic

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def make_deterministic(enabled: bool, device: torch.device) -> None:
    """Choose deterministic algorithms, or the fastest ones."""
    torch.use_deterministic_algorithms(enabled)
    if enabled and device.type == "cuda" and CUBLAS_WORKSPACE not in os.environ:
        _fix_cublas_workspace(device)
    torch.backends.cudnn.benchmark = not enabled
    # Filling new tensors with NaN finds bugs, but costs a kernel per tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _fix_cublas_workspace(device: torch.device) -> None:
    """Give cuBLAS a workspace with which its results repeat, as torch demands by a variable.

    torch reads it in the first product. As long as it is set, torch 2.11 parses it again in each
    linear layer, forward and backward, which takes the host 70 µs on an H200: so it is removed.
    """
    matrix = torch.ones(16, 16, dtype=torch.float32, device=device)

    def multiply() -> None:
        torch.mm(matrix, matrix)
        torch.nn.functional.linear(matrix, matrix, matrix[0])  # by cuBLASLt

    os.environ[CUBLAS_WORKSPACE] = ":4096:8"
    multiply()
    del os.environ[CUBLAS_WORKSPACE]
    try:
        multiply()
    except RuntimeError:  # of a version that reads it in each product
        os.environ[CUBLAS_WORKSPACE] = ":4096:8"


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
