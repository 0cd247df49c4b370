"""A recipe that records the time of each step of its processes."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from halfstep.clock import clock
from halfstep.recipe import Loss
from trainer.recipes.digits import Digits


class Clocked(Digits):
    """Digits, slowed to some 50 steps a second, with each step in $HALFSTEP_TEST_CLOCK."""

    name: ClassVar[str] = "clocked"

    def training_step(self, batch: Any) -> Iterator[Loss]:
        with Path(os.environ["HALFSTEP_TEST_CLOCK"]).open("a") as file:
            file.write(f"{os.getpid()} {clock()}\n")
        time.sleep(0.02)
        yield from super().training_step(batch)


def intervals(path: Path) -> list[tuple[float, float]]:
    """Return each process's first and last step times, in order of the first."""
    seen: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        pid, moment = line.split()
        seen.setdefault(pid, []).append(float(moment))
    return sorted((moments[0], moments[-1]) for moments in seen.values())
