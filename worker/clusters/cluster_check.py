"""Findings of `halfstep cluster check`."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    text: str
    is_fine: bool = True  # no action is needed

    def __str__(self) -> str:
        return f"{'ok ' if self.is_fine else 'NO '} {self.what}: {self.text}"


def findings_of_node(lines: Iterable[str]) -> Iterator[Finding]:
    """Parse the output of the same check on a node, run with `--here --json`."""
    for line in lines:
        finding = Finding(**json.loads(line))
        yield replace(finding, what=f"on a node, {finding.what}")
