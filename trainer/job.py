"""The job of an attempt by its files: job in, spool out, control in between."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from halfstep.run_config import parse_config
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import ControlState, Stop, TrainingJob, read_message
from halfstep.telemetry.events import Checkpoint, Event, Metric
from halfstep.telemetry.spool import SpoolWriter, Steps
from trainer.console import print_event
from trainer.distributed.ranks import Control, Request, join, rendezvous
from trainer.loop import Outcome, train
from trainer.registry import load_recipe
from trainer.setup import prepare_run


class Job:
    """Trains according to job-<attempt>.json, and tracks its progress."""

    def __init__(self, files: AttemptFiles, stop_wanted: Callable[[], bool]) -> None:
        self._files = files
        self._stop_wanted = stop_wanted
        self._control_file = ControlFile(files.control)
        self.rank = int(os.environ.get("RANK", "0"))
        self.last_step = 0  # last recorded step

    def train(self) -> Outcome:
        """Train to the end or to a stop. A recipe's exceptions are not caught."""
        job = read_message(self._files.job, TrainingJob)
        folder = self._files.folder
        recipe = load_recipe(job.recipe)
        config = parse_config(recipe, job.config)
        with ExitStack() as stack:
            meet = partial(rendezvous, self._files, job.host)
            joining = join(torch.device(job.device), meet, job.timeout_seconds)
            ranks, device = stack.enter_context(joining)
            on_event: Callable[[Event], None] = _ignore
            on_steps: Callable[[Steps], None] = _ignore
            if ranks.rank == 0:
                spool = stack.enter_context(SpoolWriter(self._files.spool, self._files.attempt))

                def on_event(event: Event) -> None:
                    spool.event(event)
                    if isinstance(event, Checkpoint | Metric):
                        print_event(event)

                def on_steps(records: Steps) -> None:
                    spool.steps(records)
                    self.last_step = int(records["step"][-1])

            weights = {name: Path(path) for name, path in job.weights.items()}
            if config.lab.task != "train":
                # Loads what no training needs.
                from trainer.diagnosis.measurement import Measurement, measure

                files = {name: Path(path) for name, path in job.checkpoints.items()}
                measure(Measurement(recipe, config, device, files, weights, on_event))
                return Outcome("finished", 0)
            return train(
                prepare_run(
                    recipe,
                    config,
                    device=device,
                    on_steps=on_steps,
                    on_event=on_event,
                    checkpoint_folder=folder / "checkpoints",
                    artifact_folder=folder / "artifacts",
                    resume=folder / job.resume if job.resume else None,
                    weights=weights,
                    started_at=job.started_at,
                    ranks=ranks,
                    is_checked=True,  # by the supervisor, from its SHA-256
                ),
                control=self._control,
                seconds_before=job.seconds_before,
            )

    def _control(self) -> Control:
        # Only one rank reads the file: two could see a change at different steps.
        control = self._control_file.read() if self.rank == 0 else Control()
        return replace(control, stop="preempt") if self._stop_wanted() else control


class ControlFile:
    """The control file of the supervisor, read again only when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._stop: Stop | None = None
        self._coming: list[Request] = []
        self._taken: set[int] = set()  # ids: a request stays in the file until it is recorded

    def read(self) -> Control:
        """Return the current control state. Costs one stat, a microsecond, while nothing changes.

        A stop persists; a request is returned once, the next one by the next call.
        """
        try:
            status = os.stat(self._path)  # noqa: PTH116 (a third of the time of Path.stat)
        except FileNotFoundError:
            return Control()
        seen = (status.st_mtime_ns, status.st_ino)
        if seen != self._seen:
            self._seen = seen
            try:
                control = read_message(self._path, ControlState)
            except ValueError as error:  # the training goes on as before
                sys.stderr.write(f"Halfstep: ignored a control request: {error}\n")
            else:
                self._stop = control.stop
                requests = [
                    Request(request.id, request.kind, request.value) for request in control.requests
                ]
                self._coming = [request for request in requests if request.id not in self._taken]
        if not self._coming:
            return Control(self._stop)
        request = self._coming.pop(0)
        self._taken.add(request.id)
        return Control(self._stop, request)


def _ignore(_: object) -> None: ...
