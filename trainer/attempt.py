"""One attempt of a run as its folder describes it: job in, spool out, control in between."""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.config import parse_config
from trainer.ranks import Request, joined
from trainer.registry import load_recipe
from trainer.spool import SpoolWriter, Steps
from trainer.train import Outcome, train


class Attempt:
    """Trains what job-<attempt>.json asks for, and knows how far it has come."""

    def __init__(self, folder: Path, attempt: int, stop_wanted: Callable[[], bool]) -> None:
        self._folder = folder
        self._attempt = attempt
        self._stop_wanted = stop_wanted
        self._control_file = ControlFile(folder / f"control-{attempt}.json")
        self.rank = int(os.environ.get("RANK", "0"))
        self.last_step = 0  # as far as recorded

    def train(self) -> Outcome:
        """Train to the end or to a stop. Whatever a recipe raises goes through."""
        job = json.loads((self._folder / f"job-{self._attempt}.json").read_text())
        recipe = load_recipe(job["recipe"])
        values = job["config"]
        if job.get("threads"):
            values = values | {"training": values.get("training", {}) | {"threads": job["threads"]}}
        config = parse_config(recipe, values)
        with ExitStack() as stack:
            ranks, device = stack.enter_context(joined(torch.device(job["device"])))
            on_event: Callable[[dict[str, Any]], None] = _ignore
            on_steps: Callable[[Steps], None] = _ignore
            if ranks.rank == 0:
                spool = stack.enter_context(SpoolWriter(self._folder / "spool", self._attempt))
                on_event = spool.event

                def on_steps(records: Steps) -> None:
                    spool.steps(records)
                    self.last_step = int(records["step"][-1])

            return train(
                recipe,
                config,
                device=device,
                on_steps=on_steps,
                on_event=on_event,
                control=self._control,
                checkpoint_folder=self._folder / "checkpoints",
                resume=self._folder / job["resume"] if job["resume"] else None,
                started_at=job["started_at"],
                ranks=ranks,
            )

    def _control(self) -> Request:
        # Only one rank reads the file: two could see a change at different steps.
        wishes = self._control_file.read() if self.rank == 0 else Request()
        return replace(wishes, stop="preempt") if self._stop_wanted() else wishes


class ControlFile:
    """What the supervisor wants, read anew only when the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._wishes: dict[str, Any] = {}

    def read(self) -> Request:
        """Return what is wanted now. One stat, a microsecond, while nothing changes.

        A stop lasts; everything else is returned once, when it has changed.
        """
        try:
            status = os.stat(self._path)  # noqa: PTH116 (a third of the time of Path.stat)
        except FileNotFoundError:
            return Request()
        seen = (status.st_mtime_ns, status.st_ino)
        if seen == self._seen:
            return Request(self._wishes["stop"])
        before, self._wishes = self._wishes, json.loads(self._path.read_text())
        self._seen = seen

        def new(wish: str) -> Any:
            value = self._wishes.get(wish)
            return value if value != before.get(wish) else None

        return Request(self._wishes["stop"], new("checkpoint"), new("set_scale"), new("replay"))


def _ignore(_: object) -> None: ...
