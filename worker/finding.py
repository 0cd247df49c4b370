"""What `halfstep cluster check` looked at, and what was found."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A line of it. is_fine: nothing has to be done."""

    what: str
    text: str
    is_fine: bool = True

    def __str__(self) -> str:
        return f"{'ok ' if self.is_fine else 'NO '} {self.what}: {self.text}"


def told(lines: Iterable[str]) -> Iterator[Finding]:
    """Read what the same check has printed on a node."""
    for line in lines:
        what, _, text = line[4:].partition(": ")
        yield Finding(f"on a node, {what}", text, line.startswith("ok "))
