"""Conversion of a training's spool items to database rows.

Shared by the two readers of spools: a worker's recorder and the server that receives watched runs.
An item is a structured array of steps or an event of halfstep.telemetry.events.
"""

import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from db.alerts import script_alerts
from db.errors import Invalid, NotFound
from db.files import artifact_versions, artifacts, checkpoints
from db.queue import queue
from db.runs import config_values, run_metadata, runs
from db.tables import COMMAND, RECIPE, Run
from db.telemetry import telemetry
from halfstep.telemetry import events
from halfstep.telemetry.events import StepEvent

#: Steps as a structured array of the spool's records, or an event.
Item: TypeAlias = NDArray[np.void] | events.Event
#: SHA-256 and size of a file's content.
BlobId: TypeAlias = tuple[str, int]

#: The constant scale of a training without a loss scaler.
UNSCALED = 1.0
#: Precision by the dtype of most matrix products.
PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


class Recording:
    """Buffer of one attempt's items until they are written as rows.

    Events of new steps are held until the attempt's first step: only then is it known from which
    step on the attempt replaces an earlier one, and an attempt without steps records no such
    events.

    may_log_alone: the run has no steps and needs none: its events are held only until a later
    attempt reports the step that it resumed from.  begins_anew: they are not held for that either.
    shares_log: other writers add lines to the log, so each line is numbered when it is written.
    has_begun: steps of this attempt are recorded.  last_line: the last line number of the log.
    resumed: the training's resume event, if any.  early: events that are held.
    """

    def __init__(
        self,
        run_id: int,
        attempt: int,
        *,
        has_begun: bool,
        last_line: int,
        resumed: events.Resumed | None = None,
        early: Sequence[StepEvent] = (),
        may_log_alone: bool = False,
        begins_anew: bool = False,
        shares_log: bool = False,
    ) -> None:
        self._may_log_alone, self._begins_anew = may_log_alone, begins_anew
        self._shares_log = shares_log
        self._run_id, self._attempt = run_id, attempt
        self._last_line = last_line
        self._is_own = True
        self.has_begun, self.resumed, self.early = has_begun, resumed, list(early)
        self.pending = telemetry.Flush()
        self.checkpoints: list[events.Checkpoint] = []  # to publish with the pending items
        self.artifacts: list[events.Artifact] = []  # likewise
        self._rolled_back: list[events.RolledBack] = []  # rollbacks of the training
        self.named: list[events.SavedArtifact | events.UsedArtifact] = []
        #: What the script reports of the run, in order.
        self._reports: list[events.Configured | events.Described | events.Alert] = []

    def __bool__(self) -> bool:
        changes = (self._rolled_back, self._reports, self.files, self.named)
        return bool(self.pending) or any(map(bool, changes))

    @property
    def files(self) -> list[events.Checkpoint | events.Artifact]:
        """Files to publish: checkpoints, then artifacts."""
        return [*self.checkpoints, *self.artifacts]

    @property
    def goes_back(self) -> bool:
        """Whether a rollback is pending, from steps that may be recorded."""
        return bool(self._rolled_back)

    @property
    def is_taken(self) -> bool:
        """Whether any pending steps, rollbacks, configuration or files came from a spool."""
        pending = (self.pending.steps, self._rolled_back, self._reports, self.files, self.named)
        return any(map(bool, pending))

    def log(self, line: events.Line) -> None:
        """Add a line to the run's log."""
        row = telemetry.LogRow.of(line, self._attempt)
        self._last_line = telemetry.number_line(row, self._last_line)
        self.pending.log_lines.append(row)

    def append_log(self, text: str) -> None:
        """Add a line in the stream "halfstep" to the run's log."""
        self.log(events.Line(time=time.time(), stream="halfstep", text=text))

    def take(self, items: Sequence[Item], *, is_own: bool = True) -> None:
        """Sort spool items by kind into the pending rows.

        is_own: the items are of this attempt, not left over from an earlier one.
        """
        self._is_own = is_own
        for item in items:
            match item:
                case np.ndarray():
                    self.pending.steps += [item] if len(item) else []
                case events.RolledBack():
                    self._take_back(item)
                case events.Configured() | events.Described() | events.Alert():
                    self._reports.append(item)
                case events.Artifact():
                    self.artifacts.append(item)
                case events.SavedArtifact() | events.UsedArtifact():
                    self.named.append(item)
                case events.Line():
                    self.log(item)
                case events.Sample():
                    self.pending.samples.append(item)
                case events.LogPart():
                    self.artifacts.append(artifacts.log_artifact(item))
                case events.Checkpoint():
                    self.checkpoints.append(item)
                    if item.is_timed:
                        self.pending.events.append(item)  # its cost is stored as a diagnosis
                case events.Resumed():
                    self.resumed = item if is_own else self.resumed
                case StepEvent():
                    self.pending.events.append(item)
        if is_own:
            self._hold_back()

    def publish(self, files: Sequence[events.Checkpoint | events.Artifact]) -> None:
        """Replace the files to publish with the pending items."""
        self.checkpoints = [file for file in files if isinstance(file, events.Checkpoint)]
        self.artifacts = [file for file in files if isinstance(file, events.Artifact)]

    def write(
        self,
        session: Session,
        checkpoint_keys: Sequence[Sequence[str]],
        artifact_keys: Sequence[str],
        blob_keys: Mapping[BlobId, str] = MappingProxyType({}),
    ) -> None:
        """Write the pending items. They stay pending, so a failed write can be repeated.

        checkpoint_keys, artifact_keys: storage keys of their files.  blob_keys: of files of named
        artifacts that are in the store. Raises StaleAttempt.
        """
        run_id, attempt = self._run_id, self._attempt
        if self._begins:
            self._begin(session)
        for event in self._rolled_back:
            telemetry.take_back(session, run_id, attempt, event)
        if self._shares_log:
            telemetry.number_lines(session, run_id, attempt, self.pending.log_lines)
        telemetry.record(session, run_id, attempt, self.pending)
        run = session.get_one(Run, run_id)
        self._note_precision(run)
        self._write_reports(session, run)
        for checkpoint, keys in zip(self.checkpoints, checkpoint_keys, strict=True):
            checkpoints.publish(session, run_id, attempt, checkpoint, keys)
        for artifact, key in zip(self.artifacts, artifact_keys, strict=True):
            artifacts.publish(session, run_id, attempt, artifact, key)
        self._write_named(session, run, blob_keys)

    def _write_reports(self, session: Session, run: Run) -> None:
        for event in self._reports:
            match event:
                case events.Configured() if run.source == COMMAND:
                    config_values.note_script(session, run, event.config)
                case events.Described():
                    run_metadata.describe(session, run, event)
                case events.Alert():
                    script_alerts.send(session, run, event)

    def _write_named(self, session: Session, run: Run, keys: Mapping[BlobId, str]) -> None:
        for event in self.named:
            try:
                if isinstance(event, events.UsedArtifact):
                    artifact_versions.use_by_run(session, run, event)
                else:
                    artifact_versions.save_of_run(session, run, event)
            except (Invalid, NotFound) as error:
                runs.remark(session, run, f"an artifact was not recorded: {error}")
        for (sha256, size_bytes), key in keys.items():
            artifact_versions.store_blob(session, sha256, size_bytes, key, run_id=run.id)

    def _note_precision(self, run: Run) -> None:
        """Set a script's precision from its events, or from its scaler if no dtype is known."""
        if run.source == RECIPE:
            return
        for event in self.pending.events:
            if isinstance(event, events.Precision) and run.precision not in ("fp16", "bf16"):
                run.precision = PRECISIONS.get(event.dtype, run.precision)
        if not run.precision:
            is_scaled = run.scale not in (None, UNSCALED)
            is_scaled |= any(isinstance(event, events.Scaler) for event in self.pending.events)
            run.precision = "fp16" if is_scaled else ""

    def forget(self) -> None:
        """Clear the pending items after their commit."""
        self.has_begun = self.has_begun or self._begins
        self.pending, self.checkpoints, self.artifacts = telemetry.Flush(), [], []
        self._rolled_back, self._reports, self.named = [], [], []

    @property
    def _begins(self) -> bool:
        begins = self.pending.steps or self._rolled_back or (self._is_known_whence and self.pending)
        return bool(begins) and self._is_own and not self.has_begun

    @property
    def _is_known_whence(self) -> bool:
        """Whether events of new steps are recorded without waiting for the first step."""
        has_start = self._attempt == 1 or self._begins_anew or self.resumed is not None
        return self._may_log_alone and has_start

    def _begin(self, session: Session) -> None:
        """Mark the attempt as started and delete the earlier steps that it replaces."""
        resumed = self.resumed or events.Resumed(step=0, exact=self._attempt == 1, notes=[])
        step, restart = resumed.step, None if self._attempt == 1 else "restarts at step 1"
        reason = in_words(resumed) if self.resumed else restart
        queue.start(session, self._run_id, self._attempt, resumed_step=step, reason=reason)
        if not (resumed.exact and queue.is_repeatable(session, self._run_id, after=step)):
            # This attempt will not reproduce the later steps of an earlier attempt.
            telemetry.truncate(session, self._run_id, self._attempt, after=step)

    def _take_back(self, event: events.RolledBack) -> None:
        """Discard pending items of the steps that the training rolled back."""

        def stays(pending_event: StepEvent) -> bool:
            return pending_event.step <= event.step or pending_event.tag in telemetry.OUTLAST

        self._rolled_back.append(event)
        pending = self.pending
        pending.steps = [steps[steps["step"] <= event.step] for steps in pending.steps]
        pending.steps = [steps for steps in pending.steps if len(steps)]
        pending.events = [row for row in pending.events if stays(row)]
        self.early = [row for row in self.early if stays(row)]

    def _hold_back(self) -> None:
        """Hold events of new steps until the first step, so that `_begin` does not delete them."""
        after: float = self.resumed.step if self.resumed else 0
        if self.has_begun or self.pending.steps or self._rolled_back or self._is_known_whence:
            after = math.inf
        rows = self.early + self.pending.events
        self.early = [row for row in rows if row.step > after]
        self.pending.events = [row for row in rows if row.step <= after]


def in_words(resumed: events.Resumed) -> str:
    """Return a sentence fragment on how an attempt resumed."""
    how = "exactly" if resumed.exact else f"not bit-exactly: {'; '.join(resumed.notes)}"
    return f"resumed at step {resumed.step:,}, {how}"
