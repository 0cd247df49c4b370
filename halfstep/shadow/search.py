"""Search for the line whose precision makes a loss wrong, over several steps.

In the step after one with a wrong loss, the rounding of each operator is measured. The lines with
the largest ones then compute in fp32, one in each of the next steps, the one next to the loss
first. The first that removes most of the error is the line to change. This module imports torch.
"""

from collections import defaultdict

from halfstep.shadow.operations import Operation
from halfstep.shadow.repair import Line
from halfstep.shadow.walk import ancestors

MOST_LINES = 12  # that are tried
MOST_TRIES = 3  # of a line, until a step has a wrong loss again
LEFT = 0.4  # largest share of the error that the line to change leaves


class LineSearch:
    """Which line to try in the step that begins."""

    def __init__(self) -> None:
        self.found: Operation | None = None
        self.measures = False  # whether the roundings of the step under way are measured
        self._candidates: list[Operation] | None = None  # the next one last
        self._tries = 0

    @property
    def is_under_way(self) -> bool:
        """Whether another step may find the line."""
        return self.found is None and (self.measures or bool(self._candidates))

    @property
    def line(self) -> Line | None:
        """The line that computes in fp32 in the step under way."""
        if self.found is not None or not self._candidates:
            return None
        return _line(self._candidates[-1])

    def see(self, loss: Operation, wrong: float, right: float, repaired: float | None) -> None:
        """Examine a wrong loss. repaired: its value with the line in fp32, if it depends
        on the line.
        """
        if self.found is not None:
            return
        if self._candidates is None:
            if self.measures:
                self._candidates = _candidates(loss)
            self.measures = self._candidates is None
            return
        if not self._candidates:
            return
        if repaired is not None and abs(repaired - right) <= LEFT * abs(wrong - right):
            self.found = self._candidates[-1]
        elif repaired is not None or self._tries == MOST_TRIES:
            self._candidates.pop()
            self._tries = 0
        else:
            self._tries += 1


def _candidates(loss: Operation) -> list[Operation]:
    """Return an operation of each line with large roundings, the line that is met last at the end.

    A line of several networks counts from the first one: what is computed between two of them is
    tried before.
    """
    latest: dict[Line, Operation] = {}
    first: dict[Line, int] = {}
    sizes: defaultdict[Line, float] = defaultdict(float)
    for operation in ancestors(loss):
        if operation.own_error:
            line = _line(operation)
            sizes[line] += operation.own_error
            first[line] = min(first.get(line, operation.number), operation.number)
            if line not in latest or operation.number > latest[line].number:
                latest[line] = operation
    largest = sorted(sizes, key=lambda line: -sizes[line])[:MOST_LINES]
    return [latest[line] for line in sorted(largest, key=first.__getitem__)]


def _line(operation: Operation) -> Line:
    return operation.place.file, operation.place.line
