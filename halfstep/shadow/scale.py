"""Dependence of values on the loss scale.

A value has power 1 if it is proportional to the scale, as a scaled loss and its gradients are, -1
if it is proportional to the inverse, 0 if it does not depend on it, and None otherwise.
"""

from collections.abc import Sequence

#: Operators of two factors: the powers add up.
PRODUCTS = frozenset({"mul", "mul_", "mm", "bmm", "dot", "mv", "matmul"})
QUOTIENTS = frozenset({"div", "div_"})
RECIPROCALS = frozenset({"reciprocal", "reciprocal_"})
SIGNS = frozenset({"sign", "sign_", "sgn", "sgn_"})  # no scale changes them
COPIES = frozenset({"copy_"})  # the result is the second argument
#: Operators whose result is proportional to their inputs.
PROPORTIONAL = frozenset(
    {
        *("abs", "abs_", "neg", "neg_", "sum", "mean", "norm", "linalg_vector_norm", "max", "min"),
        *("clone", "copy_", "_to_copy", "detach", "stack", "cat", "index", "select", "where"),
        *("add", "add_", "sub", "sub_", "rsub", "maximum", "minimum", "expand", "index_select"),
        *("amax", "amin", "masked_fill", "masked_fill_", "gather", "relu"),
        *("triu", "triu_", "tril", "tril_", "std", "take", "diag_embed", "diagonal_scatter"),
        *("cumsum", "flip", "roll", "repeat", "scatter_add_", "index_add_", "embedding"),
    }
)
LARGEST = 4  # a squared norm has 2
FOREACH = "_foreach_"


def result_power(
    name: str, powers: Sequence[int | None], number: float | None, scale: float
) -> int | None:
    """Return the power of an operator's result.

    powers: of its arguments that hold floating-point tensors, in order.  number: its second
    argument, if that is a Python number.  scale: the current one.
    """
    base = name.removeprefix(FOREACH)
    if base.endswith("_like") or base.startswith("new_") or base in SIGNS:
        return 0
    if base in COPIES:
        powers = powers[1:]
    if number is not None and powers and base in PRODUCTS | QUOTIENTS:
        powers = [*powers[:1], _power_of(number, scale) if powers[0] else 0]
    if not any(power != 0 for power in powers):
        return 0
    known = [power for power in powers if power is not None]
    if len(known) < len(powers):
        return None
    if base in PRODUCTS and len(known) == 2:
        return _bounded(known[0] + known[1])
    if base in QUOTIENTS and len(known) == 2:
        return _bounded(known[0] - known[1])
    if base in RECIPROCALS:
        return -known[0]
    return known[0] if base in PROPORTIONAL and len(set(known)) == 1 else None


def common_power(powers: Sequence[int | None]) -> int | None:
    """Return the power of a list of tensors."""
    return powers[0] if len(set(powers)) == 1 else None


def _power_of(number: float, scale: float) -> int:
    """Return the power of a Python number, by its value."""
    if scale == 1.0:
        return 0
    return 1 if number == scale else -1 if number == 1.0 / scale else 0


def _bounded(power: int) -> int | None:
    return power if abs(power) <= LARGEST else None
