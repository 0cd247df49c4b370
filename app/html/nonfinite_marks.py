"""Marks on charts of the server where values are not finite, as annotations.js has them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from halfstep.number_formats import number

#: Marks of one value along an axis.
MOST = 100
#: By value, as JSON has it; None: any of these, in a bucket.
SIGNS = {"NaN": "✕", "Infinity": "▲", "-Infinity": "▼", None: "□"}


@dataclass(frozen=True)
class Mark:
    """A mark at a share of the x axis; +∞ is at the upper edge, others are at the lower one."""

    at: float
    value: str | None

    @property
    def sign(self) -> str:
        """Its sign in legends."""
        return SIGNS[self.value]

    @property
    def name(self) -> str:
        """Its meaning in words."""
        return "not finite" if self.value is None else number(self.value)

    @property
    def is_above(self) -> bool:
        """Whether it is at the upper edge."""
        return self.value == "Infinity"


def values_of(
    x: Sequence[int], y: Sequence[object], buckets: Iterable[int]
) -> list[tuple[int, str | None]]:
    """Return step and value of what is not finite.

    y: values as JSON has them.  buckets: steps of such values that y lacks.
    """
    raw = [(step, value) for step, value in zip(x, y, strict=True) if isinstance(value, str)]
    return [*raw, *((step, None) for step in buckets)]


def marks(values: Iterable[tuple[int, str | None]], share: Callable[[int], float]) -> list[Mark]:
    """Return the marks of values, those at the same place as one."""
    places = {(round(MOST * share(step)) / MOST, value) for step, value in values}
    order = list(SIGNS)
    return [
        Mark(*place) for place in sorted(places, key=lambda place: (order.index(place[1]), place))
    ]


def signs(made: Iterable[Mark]) -> list[tuple[str, str]]:
    """Return sign and name of each kind of mark, for a legend."""
    return list(dict.fromkeys((mark.sign, mark.name) for mark in made))
