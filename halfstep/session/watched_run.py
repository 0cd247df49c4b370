"""A run that this process writes, with its spool, the observed loop and the parts around them."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from halfstep import redaction
from halfstep.api_client.credentials import Credentials
from halfstep.clock import clock
from halfstep.number_formats import duration
from halfstep.session import arguments, process_sidecar, ranks
from halfstep.session.card import Card
from halfstep.session.cell_output import CellOutput
from halfstep.session.error_guard import ErrorGuard
from halfstep.session.idle_writer import IdleWriter
from halfstep.session.nesting import flat
from halfstep.session.notebook import is_notebook
from halfstep.session.precision_diffs import PrecisionDiffs
from halfstep.session.queued_run import RUN, QueuedRun, secrets
from halfstep.session.run_files import RunFiles
from halfstep.session.run_outcome import RunOutcome
from halfstep.session.run_upload import RunUpload, server_of
from halfstep.session.stderr import say
from halfstep.session.value_log import ValueLog
from halfstep.sidecar.capture import ERR, Sidecar
from halfstep.sidecar.lines import recordable
from halfstep.telemetry import relay
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import WatchedStatus
from halfstep.telemetry.event_codec import BadEvent
from halfstep.telemetry.event_fields import NAME_CHARACTERS, TEXT_CHARACTERS, AlertLevel
from halfstep.telemetry.events import Alert, Configured, Resumed
from halfstep.telemetry.patient_spool import PatientSpool
from halfstep.telemetry.plain_json import clean, safe_repr
from halfstep.telemetry.run_folder import (
    came_to,
    configure,
    last_logged,
    read_description,
    read_run,
    script_path,
    write_outcome,
    write_run_file,
)
from halfstep.telemetry.spool import Steps
from halfstep.telemetry.writer_lock import WriterLock
from halfstep.watching.noop_watch import NoopWatch

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

    from halfstep.watching.hooks import Hooks
    from halfstep.watching.loop import Loop

PATIENCE_SECONDS = 5.0  # timeout for the device at the end: a lost one never answers
UNKNOWN = "the script did not report the step that it resumed from"


class WatchedRun:
    """A run and its parts; an exception of a method is handled by the guard."""

    #: Whether a run of this process has imported torch, which the script does not use.
    _is_torch_ours = False

    def __init__(
        self,
        files: AttemptFiles,
        *,
        optimizers: "Mapping[str, Optimizer] | None",
        scaler: "GradScaler | None",
        every: tuple[int, int | None, int, int],
        server: Credentials | None = None,
        queued: QueuedRun | None = None,
        lock: WriterLock | None = None,
    ) -> None:
        """Open the spool and install the hooks.

        every: steps between histograms, layer norms, headroom measurements and norms, 0 for none.
        server: the upload's destination, if any.  queued: set for a run of a queue.
        """
        self.files, self.queued, self._lock = files, queued, lock or WriterLock()
        # The steps of a script that has not imported torch are those that it logs.
        self._has_torch = "torch" in sys.modules and not WatchedRun._is_torch_ours
        self.has_no_torch = not find_spec("torch") or not self._has_torch
        relay.announce(files)
        first_step, sequence, started_at = 0, 0, clock()
        self._resumed: Resumed | None = None
        if queued:  # its next attempt starts over, unless the script resumes it
            first_step, sequence, started_at = queued.step, queued.sequence, queued.started_at
        elif files.attempt > 1:
            first_step, seconds = came_to(files)
            started_at -= seconds
            self._resumed = Resumed(step=first_step, exact=False, notes=[UNKNOWN])
        self.spool = PatientSpool(
            files.spool,
            files.attempt,
            say,
            sequence,
            has_refuge=queued is None,
            on_removed=self._restore_folder,
        )
        self._run_file = None if queued else read_run(files.folder)
        self.loop, self.taps = self._listen(optimizers, scaler, first_step, started_at, every)
        self.guard = ErrorGuard(self.loop, self.taps, self.spool)
        complain = self.guard.complain
        self.upload = RunUpload(files, server, self._stderr)
        self.stored = RunFiles(files, queued, self.spool, self.upload, complain)
        self.values = ValueLog(
            files, self.loop, self.spool, self._record, self.stored.log, complain
        )
        self.diffs = PrecisionDiffs(self.loop, self.taps, self.spool)
        #: Called before the run ends, however it does: what the drop-in has collected is logged.
        self.before_end: Callable[[], None] = lambda: None
        self.card = Card() if is_notebook() else None
        self.sidecar: Sidecar | None = None
        self._idle_writer = IdleWriter(self._write_early, complain)
        self._has_logged = False
        self._silent_until: dict[str, float] = {}  # by title of an alert: by halfstep.clock
        self._meeting: Path | None = None  # by which further ranks find the run
        self._cell_output: CellOutput | None = None
        self.outcome = RunOutcome(
            files, queued, self.loop, self.guard, self._finish, self._cell_ended
        )
        self.guard.arm()
        self._idle_writer.start()

    def _listen(
        self,
        optimizers: "Mapping[str, Optimizer] | None",
        scaler: "GradScaler | None",
        first_step: int,
        started_at: float,
        every: tuple[int, int | None, int, int],
    ) -> "tuple[Loop, Hooks]":
        if not find_spec("torch"):
            # NoopWatch has those methods of Loop and Hooks that a script without torch can reach.
            return cast("tuple[Loop, Hooks]", (NoopWatch(first_step, started_at),) * 2)
        from halfstep.watching.diagnoses import Intervals
        from halfstep.watching.hooks import Hooks
        from halfstep.watching.loop import Loop

        loop = Loop(
            self._record,
            self.spool.event,
            optimizers=optimizers,
            scaler=scaler,
            step=first_step,
            started_at=started_at,
            every=Intervals(*every),
            say=say,
        )
        return loop, Hooks(loop)  # disarmed hooks call nothing

    @property
    def page(self) -> str | None:
        """URL of the run's page, or one that leads to it; None offline."""
        if self.queued and (server := server_of(None, None)):
            return f"{server.url}/runs/{os.environ[RUN]}"
        return self.upload.page

    def html(self) -> str:
        """Return the card for notebooks."""
        name, page = read_description(self.files.folder).name, self.page
        place, is_over = page or str(self.files.folder), self.outcome.has_ended
        return (self.card or Card()).html(name, place, page, is_over=is_over)

    def announce_ranks(self) -> None:
        """Let further ranks of this machine find the run."""
        self._meeting = ranks.announce(self.files)

    def keep_cells(self) -> None:
        """Keep what Python prints in the cells of a notebook."""
        self._cell_output = CellOutput(process_sidecar.hidden_texts(self.upload.secret))

    def start_sidecar(
        self, *, captures: bool, samples: bool, describes: bool, keeps_code: bool
    ) -> None:
        """Start the process that keeps the output, and records machine and git state."""
        try:
            self.sidecar = process_sidecar.start(
                self.files,
                captures=captures,
                samples=samples,
                describes=describes,
                script=script_path(),
                keeps_code=keeps_code,
                hidden=process_sidecar.hidden_texts(self.upload.secret),
                elapsed_seconds=self.loop.elapsed_ms() / 1000,
                meeting=self._meeting,
            )
        except OSError as error:
            say(f"the output is not recorded; the script continues: {error}")

    def _stderr(self) -> int | None:
        return self.sidecar.original(ERR) if self.sidecar else None

    def configure(self, config: object) -> None:
        """Replace the configuration."""
        entries = arguments.config(config, self.guard.complain)
        if not self.queued:
            configure(self.files.folder, entries, self.upload.secret)
            self._run_file = read_run(self.files.folder)
            return
        entries = redaction.without(entries, *secrets())
        try:
            self.spool.event(Configured(config=entries))
        except BadEvent as error:
            self.guard.complain(f"the configuration is not recorded: {error}")

    def save_file(self, path: Path, name: str | None) -> None:
        """Copy a file into the run's files."""
        self.stored.save_file(path, name or path.name, self.values.last_step())

    def alert(self, title: str, text: str, level: AlertLevel, wait_seconds: float) -> None:
        """Send an alert, unless one of this title was sent shortly before."""
        title, moment = clean(str(title)).strip()[:NAME_CHARACTERS] or "alert", clock()
        if moment < self._silent_until.get(title, moment):
            return
        self._silent_until[title] = moment + wait_seconds
        text = clean(str(text))[:TEXT_CHARACTERS]
        self.spool.event(Alert(title=title, text=text, level=level))
        say(f"alert: {title}: {text}" if text else f"alert: {title}")

    def resume(self, step: int, *, exact: bool) -> None:
        """Set the last step."""
        self.loop.step, self.values.row_before = step, None
        notes = [] if exact else ["the script resumed it"]
        self._resumed = Resumed(step=step, exact=exact, notes=notes)

    def log_on(self, step: int) -> None:
        """Continue the log after a step."""
        self.values.row_before = None
        self.spool.event(Resumed(step=step, exact=True, notes=[]))
        self._resumed = None

    def log(self, values: Mapping[str, Any], step: int | None, *, makes_row: bool) -> None:
        """Log values. makes_row: whether a loss is the row of its step."""
        if not isinstance(values, Mapping):
            what = f"it got {safe_repr(values)}; allowed: a dictionary of values by name"
            self.guard.complain(f"log is ignored: {what}")
            return
        self.outcome.part_end = None
        if any(isinstance(value, Mapping) for value in values.values()):
            values = flat(values, "/")
        if step is None:
            if not self._has_logged and self.files.attempt > 1 and not self.loop.step:
                self._log_after_earlier()
            step = self.values.next_step(values)
        self._has_logged = True
        self.values.log(values, step, makes_row=makes_row)
        if self.values.is_due:
            self._flush()

    def _log_after_earlier(self) -> None:
        """Continue after the last number that an earlier attempt has logged, if there is one."""
        last = None if self.queued else last_logged(self.files)
        if last is not None:
            self.log_on(last)
            self.values.continue_after(last)

    def _record(self, steps: Steps) -> None:
        self._write(steps)
        self._flush()
        if self.card and self.card.is_due:
            self.card.refresh(self.html())
        if self.upload.is_due:
            self.upload.revive()

    def _write(self, steps: Steps) -> None:
        with self.spool.lock:
            if self._resumed:
                self.spool.event(self._resumed)
                self._resumed = None
            self.spool.steps(steps)
            if self.card:
                self.card.add(steps)

    def _write_early(self) -> None:
        """Write what has waited, in the idle writer's thread."""
        if self.guard.is_on:
            self.loop.write_early(self._write)
            with self.spool.lock:
                self.values.flush_early()

    def _flush(self) -> None:
        with self.spool.lock:
            for line in self._cell_output.take() if self._cell_output else ():
                self.spool.event(recordable(line))
            self.values.flush()

    def _cell_ended(self) -> None:
        self.guard.call(self._flush)
        if self.card and not self.outcome.has_ended:
            self.guard.call(self.card.refresh, self.html())

    def _restore_folder(self) -> None:
        """Write the description of the run again, whose folder has been removed."""
        if self._run_file is None:
            return
        write_run_file(self.files.folder, self._run_file)
        say(f"{self.files.folder} was removed; its newest data are written again")
        self.upload.revive()

    def leave(self) -> None:
        """Leave the run to the parent process, of which this one is a fork."""
        self.outcome.exit_hooks.cancel()
        self._lock.release()
        self.outcome.disarm()

    def _finish(self, status: WatchedStatus, error: str | None, exit_code: int | None) -> None:
        is_on = self.guard.is_on
        self.before_end()
        self._idle_writer.stop()
        self.outcome.disarm()
        try:
            self._write_rest()
        except Exception as problem:
            if is_on:  # otherwise the error that stopped the watching has occurred again
                self.guard.fail(problem)
        self.spool.close()
        self.guard.messages.end()
        WatchedRun._is_torch_ours = not (self._has_torch or self.loop.has_optimizers)
        if self._meeting:
            if not self.sidecar:
                ranks.retract(self._meeting, self.files)
            if status in ("failed", "terminated") and ranks.first_error(self.files):
                status, error = "failed", ranks.explain(error, self.files)
        write_outcome(self.files, status, self.loop.step, error, exit_code)
        if self.card:
            with suppress(Exception):  # the notebook may have gone
                self.card.refresh(self.html())
        self.values.children.close()
        relay.retract()
        self._lock.release()
        self.outcome.exit_hooks.cancel()  # not before: a pool sends SIGTERM while its workers end
        if self.queued:
            self.queued.leave(self.loop.step)
        self.upload.revive()

    def _write_rest(self) -> None:
        try:
            self.loop.close()
            if not self.loop.drain(PATIENCE_SECONDS):
                wait = duration(PATIENCE_SECONDS)
                self.guard.complain(f"the device did not respond within {wait}")
        finally:
            if self._cell_output:
                self._cell_output.stop()
        self.values.receive()
        self._flush()
