"""Emulates CUDA's autocast on a CPU, whose own autocast leaves more in fp16.

A CPU's autocast runs softmax, layer_norm, pow, sum and others in fp16 that CUDA runs in fp32, and
rejects types that CUDA promotes. `recipe check` predicts the behaviour on a GPU: within
`cudas_autocast` the operations of CUDA's lists get kernels that cast as CUDA does. (Conversely, a
few operations of linear algebra and pooling stay in fp32 as on the CPU.)

Source: the lists in aten/src/ATen/autocast_mode.h, and autocast_mode.cpp.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

KEY = "AutocastCPU"

LOWER_PRECISION = [
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot",
    "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
]  # fmt: skip
FP32 = [
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
]  # fmt: skip
FP32_UNLESS_TOLD = [
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
    "sum.dim_IntList", "norm.Scalar", "norm.ScalarOpt_dim",
]  # fmt: skip
WIDEST = [
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
    "index_put", "tensordot", "scatter_add",
]  # fmt: skip
#: cuDNN runs these in fp16. A CPU has no kernel for that, so values are rounded before and after.
RECURRENT = [
    "lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_relu.input",
]  # fmt: skip


@contextmanager
def cudas_autocast() -> Iterator[None]:
    """Make regions of autocast on the CPU cast as on CUDA."""
    library = torch.library.Library("aten", "IMPL", KEY)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about overriding torch's own kernels
        for names, kernel in (
            ([name for name in LOWER_PRECISION if not _has_kernel(name)], _in_lower_precision),
            (FP32, _in_fp32),
            (FP32_UNLESS_TOLD, _in_fp32_unless_told),
            (WIDEST, _in_the_widest),
            (RECURRENT, _make_rounding),
        ):
            for name in names:
                library.impl(name, kernel(_operation(name)), KEY)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _has_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", KEY)


def _operation(name: str) -> Callable[..., object]:
    packet, _, overload = name.partition(".")
    operation: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operation


def _in_lower_precision(operation: Callable[..., object]) -> Callable[..., Any]:
    def kernel(*args: object, **kwargs: object) -> object:
        return _call(operation, *_cast((args, kwargs), torch.get_autocast_dtype("cpu")))

    return kernel


def _in_fp32(operation: Callable[..., object]) -> Callable[..., Any]:
    def kernel(*args: object, **kwargs: object) -> object:
        return _call(operation, *_cast((args, kwargs), torch.float32))

    return kernel


def _in_fp32_unless_told(operation: Callable[..., object]) -> Callable[..., Any]:
    def kernel(*args: object, **kwargs: object) -> object:
        has_dtype = any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values()))
        cast = (args, kwargs) if has_dtype else _cast((args, kwargs), torch.float32)
        return _call(operation, *cast)

    return kernel


def _in_the_widest(operation: Callable[..., object]) -> Callable[..., Any]:
    def kernel(*args: object, **kwargs: object) -> object:
        is_wide = any(_is_cast(t) and t.dtype == torch.float32 for t in tree_leaves((args, kwargs)))
        cast = _cast((args, kwargs), torch.float32) if is_wide else (args, kwargs)
        return _call(operation, *cast)

    return kernel


def _make_rounding(operation: Callable[..., object]) -> Callable[..., Any]:
    def kernel(*args: object, **kwargs: object) -> object:
        dtype = torch.get_autocast_dtype("cpu")
        rounded = _cast(_cast((args, kwargs), dtype), torch.float32)
        return _cast(_call(operation, *rounded), dtype)

    return kernel


def _call(operation: Callable[..., object], args: Any, kwargs: Any) -> object:
    with torch._C._DisableAutocast():
        return operation(*args, **kwargs)


def _cast(tree: object, dtype: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, tree)


def _is_cast(value: object) -> bool:
    """Return whether autocast casts a value: a floating-point tensor other than float64."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
