"""Classification of a nonfinite gradient by its operation and dtype. Does not need torch."""

import re
from typing import Literal

#: Operations whose gradient is undefined at some inputs, in any precision.
SINGULAR = frozenset(
    """
    Acos Acosh Asin Atan2 Atanh Cdist Digamma Div Exp Expm1 Lgamma LinalgCholeskyEx LinalgEigh
    LinalgInvEx LinalgSvd LinalgVectorNorm Log Log10 Log1P Log2 LogSoftmax Logit Logsumexp Norm Pow
    Prod Reciprocal Rsqrt Softmax Sqrt Std Var Xlogy
    """.split()  # noqa: SIM905 - as a list it is four times as long
)

Kind = Literal["overflow", "singular", "hidden", "compiled"]


def kind_of(node: str, dtype: str) -> Kind:
    """Classify the first node whose gradient is not finite.

    overflow: beyond the range of half precision.  singular: the derivative is undefined there.
    hidden: an activation or weight was already nonfinite, in a type with a large range.
    compiled: a whole compiled region is one node, so the operation is unknown.
    """
    if node.startswith("Compiled"):
        return "compiled"
    if re.sub(r"Backward\d*$", "", node) in SINGULAR:
        return "singular"
    return "overflow" if dtype in ("float16", "bfloat16") else "hidden"
