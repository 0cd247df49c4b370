"""What an operation says of a number that is not finite, by its name and type. Without torch."""

import re
from typing import Literal

#: Operations whose gradient is not finite where it is not defined, whatever the precision.
SINGULAR = frozenset(
    """
    Acos Acosh Asin Atan2 Atanh Cdist Digamma Div Exp Expm1 Lgamma LinalgCholeskyEx LinalgEigh
    LinalgInvEx LinalgSvd LinalgVectorNorm Log Log10 Log1P Log2 LogSoftmax Logit Logsumexp Norm Pow
    Prod Reciprocal Rsqrt Softmax Sqrt Std Var Xlogy
    """.split()  # noqa: SIM905 - as a list it is four times as long
)

Kind = Literal["overflow", "singular", "hidden", "compiled"]


def kind_of(node: str, dtype: str) -> Kind:
    """Return what the first node says whose gradient is not finite.

    overflow: half precision cannot hold it.  singular: the derivative is not defined there.
    hidden: an activation or weight was not finite before, in a type that holds large numbers.
    compiled: a whole compiled region is one node, and says nothing.
    """
    if node.startswith("Compiled"):
        return "compiled"
    if re.sub(r"Backward\d*$", "", node) in SINGULAR:
        return "singular"
    return "overflow" if dtype in ("float16", "bfloat16") else "hidden"
