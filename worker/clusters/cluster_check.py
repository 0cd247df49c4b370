"""What `halfstep cluster check` looked at, and what was found."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Finding:
    """A line of it. is_fine: nothing has to be done."""

    what: str
    text: str
    is_fine: bool = True

    def __str__(self) -> str:
        return f"{'ok ' if self.is_fine else 'NO '} {self.what}: {self.text}"


def told(lines: Iterable[str]) -> Iterator[Finding]:
    """Read what the same check has printed on a node, by `--here --json`."""
    for line in lines:
        found = Finding(**json.loads(line))
        yield replace(found, what=f"on a node, {found.what}")
