"""Public watch() function and Watch class, which record a training loop.

Two lines in a script, whatever framework it uses:

    import halfstep
    halfstep.watch(model)

This records every step's loss, loss scale, skips with their culprits and gradient norms in a
folder on the local disk (see run_folder.py), and uploads it if a server is configured (see
uploader.py). It never changes the training by a bit, makes the host wait for the device, or ends
the script: an internal error is one line on stderr.
"""

import hashlib
import os
import shutil
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from halfstep import redaction
from halfstep.api_client import credentials, local_server
from halfstep.api_client.credentials import Credentials, Unreadable
from halfstep.clock import clock
from halfstep.importing.columns import columns_of
from halfstep.number_formats import duration
from halfstep.session import arguments, ranks, sweep_point
from halfstep.session.card import Card
from halfstep.session.cell_output import CellOutput
from halfstep.session.exit_hooks import ExitHooks
from halfstep.session.logged_values import as_scalar, files_of, is_number
from halfstep.session.nesting import merged
from halfstep.session.notebook import Cells, is_notebook
from halfstep.session.queued_run import FOLDER as QUEUED_FOLDER
from halfstep.session.queued_run import RUN, QueuedRun, data_of, queued_files, secrets
from halfstep.session.stderr import in_a_line, say
from halfstep.session.sweep_point import SweepPoint
from halfstep.sidecar.capture import ERR, Sidecar, is_interactive
from halfstep.sidecar.lines import recordable
from halfstep.telemetry import relay, uploader
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import Job, WatchedStatus, read_message
from halfstep.telemetry.event_codec import BadEvent
from halfstep.telemetry.events import (
    Artifact,
    Checkpoint,
    CheckpointFile,
    Configured,
    FailedDiagnosis,
    Metric,
    Resumed,
)
from halfstep.telemetry.logged_rows import LoggedRow, rows_of
from halfstep.telemetry.patient_spool import PatientSpool
from halfstep.telemetry.plain_json import LARGEST_WHOLE, cleaned, shown
from halfstep.telemetry.relay import RelayReader, RelayWriter
from halfstep.telemetry.run_folder import (
    RUNS,
    RunIsWritten,
    came_to,
    configure,
    described_in,
    is_called,
    open_run,
    slug,
    write_outcome,
)
from halfstep.telemetry.spool import Steps
from halfstep.telemetry.writer_lock import WriterLock
from halfstep.watching.noop_watch import NoopWatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

    from halfstep.precision_lab.report import PrecisionReport
    from halfstep.session.artifacts import SavedVersion
    from halfstep.telemetry.events import UsedArtifact
    from halfstep.watching.hooks import Hooks
    from halfstep.watching.loop import Loop

MOST_DIFFS = 100  # precision diffs that a run records
PATIENCE_SECONDS = 5.0  # timeout for the device at the end: a lost one never answers
FLUSH_SECONDS = 0.2  # between flushes of logged values while no step ends
SERVICE = "halfstep-service"  # the package that has the command `halfstep show`
PAGE_SECONDS = 1.0  # timeout for the server to return the URL of the run's page
REVIVAL_SECONDS, REVIVALS = 30.0, 5  # between two checks of the uploader; most restarts of it
UNKNOWN = "the script did not report the step that it resumed from"


def watch(
    *modules: "nn.Module",
    optimizers: "Mapping[str, Optimizer] | Sequence[Optimizer] | None" = None,
    scaler: "GradScaler | None" = None,
    name: str | None = None,
    config: object = None,
    project: str | None = None,
    tags: Sequence[str] = (),
    run: str | None = None,
    url: str | None = None,
    token: str | None = None,
    folder: str | Path | None = None,
    mode: arguments.Mode = "auto",
    console: bool = True,
    system: bool = True,
    histogram_every: int = 0,
    layers_every: int = 0,
    headroom_every: int = 0,
    norms_every: int = 1,
) -> "Watch":
    """Record this process's training until it ends or `finish()`.

    A second call adds its modules to the same run.

    modules: name the parameters.  optimizers, scaler: the only ones to watch, if there are
    others; with several optimizers and no scaler, a step is one step of each.  config: the run's
    configuration, anything that converts to a dictionary.  run: continue this run as its next
    attempt; config then replaces only the keys that it contains.
    url, token: the server's; by default HALFSTEP_URL and HALFSTEP_TOKEN, those of `halfstep
    login`, or the `halfstep up` that this user runs on this machine.
    folder: parent folder of the runs, by default ./halfstep-runs.
    mode: "offline" uploads nothing, "disabled" does nothing at all; by default HALFSTEP_MODE.
    console: keep what the process and its children print; HALFSTEP_CONSOLE=no turns it off.
    system: sample the use of the machine and its GPUs; HALFSTEP_SYSTEM=no turns it off.
    In a command from a server's queue the run is the queued one; name, project, run, url and
    folder are ignored.

    histogram_every: steps between histograms of the gradients' exponents; layers_every: between
    gradient norms per layer; headroom_every: between measurements of each module's largest values;
    norms_every: between norms of all gradients: a skip in between has no culprits.
    """
    global _active
    if _active is not None and not _active._is_superseded(run, name):
        _active._called_again(run, name)
        _active.add(*modules)
        return _active
    try:
        queued_as = queued_files()
        project = _project_of(queued_as) if queued_as else arguments.label("project", project)
        chosen = arguments.mode(mode)
        if chosen == "disabled":
            return Watch(None, project=project, named=(url, token))
        if number := ranks.rank():
            server = None if chosen == "offline" else _server(url, token)
            secret = server.token if server else token
            _keep_rank(number, arguments.folder(folder), secret, console=console, system=system)
            if not queued_as:
                project = sweep_point.project() or project
            is_offline = chosen == "offline"
            return Watch(None, server=server, is_offline=is_offline, project=project)
        if _sidecar:
            _sidecar.stop()
        every = arguments.intervals(histogram_every, layers_every, headroom_every, norms_every)
        if queued := QueuedRun.taken():
            _active = Watch(
                queued.files,
                optimizers=arguments.optimizers(optimizers),
                scaler=arguments.scaler(scaler),
                queued=queued,
                every=every,
            )
            _active.add(*modules)
            if config is not None:
                _active.configure(config)
            say(f"watching; this is run {os.environ[RUN]} of the queue")
            return _active
        point = SweepPoint.taken()
        if point:
            name, project, run = point.name, point.project or None, None
        captures = arguments.switch("console", console) and not is_interactive()
        samples = arguments.switch("system", system)
        server = None if chosen == "offline" else _server(url, token)
        lock = WriterLock()
        files = open_run(
            arguments.folder(folder),
            name=arguments.label("name", name),
            run=arguments.run(run),
            project=project,
            config=_with_point(arguments.first_config(config), point),
            tags=arguments.tags(tags),
            secret=server.token if server else token,
            say=say,
            claim=lock.claim,
            identity=point.watch_id if point else None,
        )
        _active = Watch(
            files,
            optimizers=arguments.optimizers(optimizers),
            scaler=arguments.scaler(scaler),
            server=server,
            lock=lock,
            every=every,
            is_offline=chosen == "offline",
        )
    except RunIsWritten as error:
        say(f"not watching: {error}")
        return Watch(None, project=project, named=(url, token))
    except Exception as error:
        say(f"not watching; the script continues: {type(error).__name__}: {error}")
        return Watch(None, project=project, named=(url, token))
    _active.sweep_settings = point.config if point else {}
    if ranks.world_size() > 1:
        _active._guard(_active._announce_ranks)
    _active.add(*modules)
    if is_notebook() and arguments.switch("console", console):
        _active._guard(_active._keep_cells)
    if captures or samples:
        _active._guard(_active._start_sidecar, captures=captures, samples=samples)
    _active._guard(_active._send)
    return _active


_active: "Watch | None" = None
_sidecar: Sidecar | None = None  # an exception's traceback is printed after the run's end
_parents: "Watch | None" = None  # the run of the process that forked or spawned this one


def current() -> "Watch | None":
    """Return this process's run, or in a multiprocessing child its parent's."""
    global _parents
    if _active is None and _parents is None and (files := relay.announced()):
        _parents = _relayed(files)
    return _active or _parents


class _Logged(NamedTuple):
    """A number that `log` received; on a device, it may not have arrived yet."""

    arrived: Any  # a CUDA event; None: on the host
    step: int
    name: str
    value: Any
    elapsed_ms: int


class Watch:
    """A watched run, also a context manager; it ends with the script or at `finish()`."""

    def __init__(
        self,
        files: AttemptFiles | None,
        *,
        optimizers: "Mapping[str, Optimizer] | None" = None,
        scaler: "GradScaler | None" = None,
        server: Credentials | None = None,
        queued: QueuedRun | None = None,
        lock: WriterLock | None = None,
        every: tuple[int, int, int, int] = (0, 0, 0, 1),
        is_offline: bool = False,
        project: str | None = None,
        named: tuple[str | None, str | None] = (None, None),
    ) -> None:
        """Open the spool and install the hooks, unless files is None.

        files: the files to write; None: nothing is watched, and every method does nothing.
        server: the upload's destination, if any.  is_offline: no server is
        asked for artifacts either.  project: of the artifacts that it uses, without files.  named:
        URL and token of the server with them, without `server`.  queued: set for a run of a queue,
        see QueuedRun.
        every: steps between histograms, layer norms, headroom measurements and norms, 0 for none.
        """
        self.files = files
        self._card: Card | None = None
        self._diffs = 0  # precision diffs made
        self._meeting: Path | None = None  # by which further ranks find the run
        self.sweep_settings: dict[str, Any] = {}  # of the sweep's point, if an agent started it
        self.page: str | None = None  # URL of the run's page, once the server has answered
        self._server, self._is_offline = server, is_offline
        self._project_without_files, self._named = project or "", named
        self._queued = queued
        self._sidecar: Sidecar | None = None
        self._lock = lock or WriterLock()
        self._is_on = False
        self._has_ended = files is None
        self.has_no_torch = False
        self._relay: RelayWriter | None = None  # in a child process
        if files is None:
            return
        # The steps of a script that has not imported torch are those that it logs.
        self.has_no_torch = not find_spec("torch") or "torch" not in sys.modules
        relay.announce(files)
        self._children = RelayReader(files)
        # Returns the step for numbers that a child process logs without one.
        self.step_of_children: Callable[[], int] = self._last_step
        first_step, sequence, started_at = 0, 0, clock()
        self._resumed: Resumed | None = None
        if queued:  # its next attempt starts over, unless the script resumes it
            first_step, sequence, started_at = queued.step, queued.sequence, queued.started_at
        elif files.attempt > 1:
            first_step, seconds = came_to(files)
            started_at -= seconds
            self._resumed = _resumed(first_step, [UNKNOWN])
        self._spool = PatientSpool(files.spool, files.attempt, say, sequence)
        self._loop, self._taps = self._listen(optimizers, scaler, first_step, started_at, every)
        # Each with the CUDA event of its copy to the host, or None.
        self._logged: deque[_Logged] = deque()
        #: Whether a logged loss is the row of its step; see `has_no_torch`.
        self.makes_rows = False
        self._row_before: tuple[int, int] | None = None  # step and elapsed_ms of the last one
        self._logged_step = first_step
        self._flushed_at = clock()
        self._looked_at = clock()
        self._revivals = 0
        self._card = Card() if is_notebook() else None
        self._complaints: set[str] = set()
        self._exit_hooks = ExitHooks(
            self._process_ends, files.exit_code, files.crash, self._part_raised, self._fail
        )
        self._cells = Cells(self._part_raised, self._cell_ended)
        self._cell_output: CellOutput | None = None
        # Step, status and error of the notebook cell or pool task that raised last.
        self._part_end: tuple[int, WatchedStatus, str] | None = None
        self._taps.arm(self._exit_hooks)
        self._is_on = True

    def _listen(
        self,
        optimizers: "Mapping[str, Optimizer] | None",
        scaler: "GradScaler | None",
        first_step: int,
        started_at: float,
        every: tuple[int, int, int, int],
    ) -> "tuple[Loop, Hooks]":
        if not find_spec("torch"):
            # NoopWatch has those methods of Loop and Hooks that a script without torch can reach.
            return cast("tuple[Loop, Hooks]", (NoopWatch(first_step, started_at),) * 2)
        from halfstep.watching.diagnoses import Intervals
        from halfstep.watching.hooks import Hooks
        from halfstep.watching.loop import Loop

        loop = Loop(
            self._record,
            self._spool.event,
            optimizers=optimizers,
            scaler=scaler,
            step=first_step,
            started_at=started_at,
            every=Intervals(*every),
            say=say,
        )
        return loop, Hooks(loop)  # disarmed hooks call nothing

    @property
    def folder(self) -> Path | None:
        """The run's folder; None if nothing is watched."""
        return self.files.folder if self.files else None

    def _repr_html_(self) -> str:
        """Return the run's card, for notebooks; it is updated while the run goes on."""
        if self.files is None:
            return "<div>Nothing is watched.</div>"
        card = self._card or Card()
        name = described_in(self.files.folder).name
        place = self.page or str(self.files.folder)
        return card.html(name, place, self.page, is_over=self._has_ended)

    def _ipython_display_(self) -> None:
        """Display the card in a notebook, and keep it up to date."""
        if self._card is None or not self._card.show(self._repr_html_()):
            print(repr(self))  # noqa: T201 - as IPython does without this method

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration, with the settings of a sweep's point; empty if unwatched."""
        if self.files is None or self._queued:
            return {}
        return dict(described_in(self.files.folder).config or {})

    @property
    def secret(self) -> str | None:
        """The server's token, which no written file may contain."""
        return self._server.token if self._server else None

    @property
    def is_relayed(self) -> bool:
        """True in a child process, whose parent writes the run."""
        return self._relay is not None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the handle by which a spawned child logs to the run."""
        return (Watch, (None,)) if self.files is None else (_relayed, (self.files,))

    @property
    def step(self) -> int:
        """The number of attempted steps."""
        return self._loop.step if self.files else 0

    def add(self, *modules: "nn.Module") -> None:
        """Name parameters as these modules do."""
        self._asked("add", lambda: self._loop.add(arguments.modules(modules)))

    def configure(self, config: object) -> None:
        """Replace the run's configuration."""
        self._asked("configure", lambda: self._configure(config))

    def resume(self, step: int, *, exact: bool = False) -> None:
        """Set the step that the script resumes from: the next step is that plus 1.

        exact: the script restored all of its state.
        """
        self._asked("resume", lambda: self._resume(arguments.step(step), exact))

    def log_on(self, step: int) -> None:
        """Continue the log of a run without training steps after this step.

        Values already logged for later steps are replaced.
        """
        self._asked("log_on", lambda: self._log_on(arguments.step(step)))

    def loss(self, loss: "Tensor | float") -> None:
        """Record the current step's loss, if it differs from the tensor that is scaled.

        Several calls in a step are averaged. A tensor is read together with the step's row.
        """
        self._asked("loss", lambda: self._loop.add_loss(arguments.loss(loss)))

    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Log numbers, texts, images, figures, tables or histograms for a step.

        A number on the device is copied to the host without waiting; an image on the device is
        waited for.  step: the last one by default.  A child process can log only numbers, by
        default for the parent's last step.
        """
        if self._relay:
            self._relay.log(values, step)
            return

        def log() -> None:
            self._log(values, self.step if step is None else arguments.step(step))

        self._asked("log", log)

    def checkpoint(
        self, path: str | Path, *, kind: str = "checkpoint", upload: bool = False
    ) -> None:
        """Register a file with its size and SHA-256, and link it into the run's folder.

        kind: "checkpoint", "weights" or "weights.<module>".  upload: copy the file into the folder
        and upload it, for download from the run's page.  Returns once the file is read.
        """
        self._asked("checkpoint", lambda: self._checkpoint(Path(path), kind, upload))

    def precision_diff(
        self,
        closure: "Callable[[], Tensor]",
        *,
        dtype: "torch.dtype | None" = None,
        scale: float | None = None,
        reference: "torch.dtype | None" = None,
    ) -> "PrecisionReport | None":
        """Compare a batch in low precision with fp32, module by module, on the run's page.

        closure: returns the loss of the watched modules; called several times, so it must not draw
        a new batch.  dtype: of autocast, by default float16 with a GradScaler, else bfloat16.
        scale: the loss scale, by default the scaler's.  reference: torch.float32, or torch.float64.

        Takes several times as long as a step. Weights, buffers, gradients, random generators, and
        the attributes of modules with lists and dictionaries in them, stay as they are; objects of
        other classes that the loss or a module changes do not. Returns None, after a line on
        stderr, if no diff can be made.
        """
        reports: list[PrecisionReport] = []
        self._asked(
            "precision_diff",
            lambda: reports.append(self._precision_diff(closure, dtype, scale, reference)),
        )
        return reports[0] if reports else None

    def save_artifact(
        self,
        path: "str | Path | Mapping[str, str | Path]",
        *,
        name: str,
        type: str = "artifact",  # noqa: A002 - as in W&B
        aliases: Sequence[str] = (),
    ) -> "SavedVersion | None":
        """Save a file or folder as a version of a named artifact, which this run made.

        path: a file, a folder, or several files by their paths within the version.

        Content that the artifact has already makes no new version. The newest one has the alias
        "latest"; aliases: further ones, such as "best".  Returns once the content is copied into
        the run's folder; None if it is not recorded.
        """
        saved: list[SavedVersion] = []
        self._asked(
            "save_artifact",
            lambda: saved.append(self._save_artifact(path, name, type, aliases)),
        )
        return saved[0] if saved else None

    def use(self, reference: str) -> Path:
        """Return the local files of an artifact's version, which this run uses: "data:v3".

        They are downloaded from the server unless they are in the cache, and verified: a folder,
        or the file that was saved as one, both read-only.  Also: "data" for the latest version,
        "data:best" by alias, "project/data:v3".  Raises ArtifactError or ApiError without them.
        """
        from halfstep.session import artifacts

        server = self._server or (None if self._is_offline else _server(*self._named))
        path, event = artifacts.use(reference, project=self._project, server=server, say=say)
        if not self._relay:
            self._guard(self._record_use, event)
        return path

    def finish(self) -> None:
        """End the run: fetch what is still on the device, and restore torch and the output."""
        self._end("finished", None)
        if self._sidecar:
            self._sidecar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if kind is None:
            self.finish()
        elif self.files:
            self._exit_hooks.raised(kind, error, trace)

    # ---- Sidecar ------------------------------------------------------------------------------

    def _start_sidecar(self, *, captures: bool, samples: bool) -> None:
        """Start the process that keeps the output and samples the machine."""
        global _sidecar
        files = self._written
        hidden = redaction.values(os.environ)
        if self.secret:
            hidden.append(self.secret)
        try:
            self._sidecar = _sidecar = Sidecar(
                files,
                captures=captures,
                samples=samples,
                hidden=hidden,
                elapsed_seconds=self._loop.elapsed_ms() / 1000,
                meeting=self._meeting,
            )
        except OSError as error:
            say(f"the output is not recorded; the script continues: {error}")

    def _announce_ranks(self) -> None:
        """Let further ranks of this machine find the run."""
        self._meeting = ranks.announce(self._written)

    def _keep_cells(self) -> None:
        """Keep what Python prints in the cells of a notebook."""
        hidden = redaction.values(os.environ)
        self._cell_output = CellOutput([*hidden, self.secret] if self.secret else hidden)

    def _cell_ended(self) -> None:
        self._guard(self._flush)
        if self._card and not self._has_ended:
            self._guard(self._card.refresh, self._repr_html_())

    @property
    def _stderr(self) -> int | None:
        """The script's own stderr: a process that outlives the script must not keep the sidecar."""
        return self._sidecar.original(ERR) if self._sidecar else None

    # ---- Upload -------------------------------------------------------------------------------

    def _send(self) -> None:
        """Start the upload if a server is configured; print the run's page or folder."""
        files = self._written
        place = f"the run is in {files.folder}"
        if self._server is None:
            runs = files.folder.parent
            command = "halfstep show" if runs == Path.cwd() / RUNS else f"halfstep show {runs}"
            upload = f"`halfstep upload {files.folder}` uploads it to a server"
            say(f"watching; {place}; {f'`{command}` opens it' if _can_show() else upload}")
            return
        try:
            page = uploader.start(files, self._server, PAGE_SECONDS, self._stderr)
        except OSError as error:
            command = f"`halfstep upload {files.folder}`"
            say(f"watching; {place}; {command} uploads it: the uploader cannot start: {error}")
            self._server = None
            return
        self.page = page or None
        if page is None:
            place += f"; {self._server.url} has not answered yet"
        say(f"watching; {page or place}")

    def _revive(self) -> None:
        """Restart an uploader that was killed, at most REVIVALS times."""
        self._looked_at = clock()
        if (
            self._server
            and self._revivals < REVIVALS
            and not uploader.is_uploading(self._written.folder)
        ):
            self._revivals += 1
            with suppress(OSError):  # no process can start: retried at the next check, or by hand
                uploader.start(self._written, self._server, stderr=self._stderr)

    # ---- Recording ----------------------------------------------------------------------------

    def _record(self, steps: Steps) -> None:
        if self._resumed:
            self._spool.event(self._resumed)
            self._resumed = None
        self._spool.steps(steps)
        self._flush()
        if self._card:
            self._card.add(steps)
            if self._card.is_due:
                self._card.refresh(self._repr_html_())
        if clock() - self._looked_at > REVIVAL_SECONDS:
            self._revive()

    def _configure(self, config: object) -> None:
        entries = arguments.config(config, self._complain)
        if not self._queued:
            configure(self._written.folder, entries, self.secret)
            return
        entries = redaction.without(entries, *secrets())
        try:
            self._spool.event(Configured(config=entries))
        except BadEvent as error:
            self._complain(f"the configuration is not recorded: {error}")

    def _resume(self, step: int, exact: bool) -> None:
        self._loop.step, self._row_before = step, None
        self._resumed = _resumed(step, [] if exact else ["the script resumed it"])

    def _log_on(self, step: int) -> None:
        self._row_before = None
        self._spool.event(_resumed(step, []))
        self._resumed = None

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        if not isinstance(values, Mapping):
            self._complain(f"log got {shown(values)}; allowed: a dictionary of values by name")
            return
        self._part_end, self._logged_step = None, step
        if self.makes_rows:
            values = self._without_row(values, step)
        for name, value in values.items():
            try:
                if not isinstance(name, str) or not name.strip():
                    what = f"its name is {in_a_line(name)}; allowed: {arguments.LABEL}"
                    self._complain(f"a value is not logged: {what}")
                elif is_number(value):
                    self._log_number(cleaned(name), value, step)
                else:
                    self._log_file(cleaned(name), value, step)
            except Exception as error:  # the library of a figure or table can raise anything here
                self._complain(f"{str(name)[:100]} is not logged: {error}")
        if clock() - self._flushed_at > FLUSH_SECONDS:
            self._flush()

    def _without_row(self, values: Mapping[str, Any], step: int) -> Mapping[str, Any]:
        """Write the row of a step, if the values have a loss; return the other values."""
        if step <= self.step:
            return values
        numbers = {name: float(value) for name, value in values.items() if _is_column(name, value)}
        row = LoggedRow.of(step, self._loop.elapsed_ms(), numbers)
        if row is None:
            return values
        self._record(rows_of([row], self._row_before))
        self._loop.step, self._row_before = row.step, (row.step, row.elapsed_ms)
        return {name: value for name, value in values.items() if name not in row.columns}

    def _log_number(self, name: str, value: Any, step: int) -> None:
        arrived = None
        if hasattr(value, "detach"):
            value = value.detach()
        value = as_scalar(value)
        if getattr(value, "is_cuda", False):
            import torch

            stream = torch.cuda.current_stream(value.device)
            value = value.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(stream)
        self._logged.append(_Logged(arrived, step, name, value, self._loop.elapsed_ms()))

    def _log_file(self, name: str, value: Any, step: int) -> None:
        for file_name, content in files_of(name, value):
            place = self._inside(Path("artifacts") / f"step-{step:08}") / file_name
            place.write_bytes(content)
            path, size_bytes, sha256 = self._of(place)
            self._spool.event(
                Artifact(
                    step=step, name=place.name, path=path, size_bytes=size_bytes, sha256=sha256
                )
            )

    def _checkpoint(self, path: Path, kind: str, upload: bool) -> None:
        if not path.is_file():
            self._complain(f"{path} is not a file, and is not registered as a checkpoint")
            return
        folder = Path("checkpoints") / f"step-{self.step:08}"
        place = self._inside(folder if kind == "checkpoint" else folder / slug(kind))
        place /= cleaned(path.name)
        place.unlink(missing_ok=True)
        # The script may overwrite the file before it is uploaded or stored.
        if upload or self._queued or not _linked(place, path):
            shutil.copyfile(path, place)
        stored_path, size, digest = self._of(place)
        file = CheckpointFile(kind=kind, path=stored_path, size_bytes=size, sha256=digest)
        try:
            self._spool.event(
                Checkpoint(step=self.step, reason="script", files=[file], upload=upload)
            )
        except BadEvent as error:
            self._complain(f"{path} is not registered: {error}")

    def _save_artifact(
        self,
        path: "str | Path | Mapping[str, str | Path]",
        name: str,
        type_: str,
        aliases: Sequence[str],
    ) -> "SavedVersion":
        from halfstep.session import artifacts

        folder = self._written.folder
        event = artifacts.saved_event(folder, path, name, type_, aliases)
        self._spool.event(event)
        if not self._queued:
            artifacts.remember_saved(folder, event, self._project, self._server)
        return artifacts.version_of(event)

    def _precision_diff(
        self,
        closure: "Callable[[], Tensor]",
        dtype: "torch.dtype | None",
        scale: float | None,
        reference: "torch.dtype | None",
    ) -> "PrecisionReport":
        if isinstance(self._loop, NoopWatch) or not self._loop.modules:
            raise arguments.BadArgument("no module is watched; name the model: watch(model)")
        import torch

        from halfstep.precision_lab.diff import diff_of
        from halfstep.precision_lab.report import PrecisionReport

        scaler = self._loop.scaler
        dtype = dtype or (torch.float16 if scaler else torch.bfloat16)
        if scale is None and scaler is not None and dtype == torch.float16:
            scale = scaler.get_scale()
        with self._taps.suspended():
            event = diff_of(
                self._loop.modules,
                closure,
                dtype,
                scale,
                reference or torch.float32,
                step=self.step,
            )
        if self._diffs < MOST_DIFFS:
            self._spool.event(event)
        elif self._diffs == MOST_DIFFS:
            say(f"{MOST_DIFFS} precision diffs are recorded; further ones are only returned")
        self._diffs += 1
        return PrecisionReport(event)

    def _record_use(self, event: "UsedArtifact") -> None:
        self._spool.event(event)

    @property
    def _project(self) -> str:
        """The run's project; empty: the Default project."""
        return _project_of(self.files) if self.files else self._project_without_files

    def _inside(self, folder: Path) -> Path:
        """Create a folder within the run's folder, and return its path."""
        place = self._written.folder / folder
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _of(self, place: Path) -> tuple[str, int, str]:
        """Return a file's path, size in bytes and SHA-256 as an event holds them."""
        with place.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        path = place.relative_to(self._written.folder).as_posix()
        return path, place.stat().st_size, digest

    def _flush(self) -> None:
        """Write the logged numbers that have arrived on the host."""
        self._flushed_at = clock()
        if self._children.is_due():
            self._receive()
        for line in self._cell_output.take() if self._cell_output else ():
            self._spool.event(recordable(line))
        while self._logged and (self._logged[0].arrived is None or self._logged[0].arrived.query()):
            _, step, name, value, elapsed_ms = self._logged.popleft()
            try:
                number = float(value)
            except Exception:  # any object that looks like a number
                what = f"it is {in_a_line(value)}; allowed: a number that a float can hold"
                self._complain(f"{name:.100} is not logged: {what}")
                continue
            try:
                self._spool.event(Metric(step=step, name=name, value=number, elapsed_ms=elapsed_ms))
            except Exception as error:  # a name that is too long, for example
                self._complain(f"{name:.100} is not logged: {error}")

    def _last_step(self) -> int:
        return max(self.step, self._logged_step)

    def _receive(self) -> None:
        """Read the numbers that child processes have logged."""
        try:
            for numbers, step in self._children.receive():
                at = self.step_of_children() if step is None else step
                for name, value in numbers.items():
                    self._log_number(cleaned(name), value, at)
        except OSError as error:
            self._complain(f"values of child processes cannot be read: {error}")

    @property
    def _written(self) -> AttemptFiles:
        if self.files is None:
            raise RuntimeError("nothing is watched")
        return self.files

    # ---- End of the run, and error handling ---------------------------------------------------

    def _guard(self, call: Callable[..., None], *given: Any, **named: Any) -> None:
        """Call an internal function; if it raises, print one line and stop watching."""
        if self._is_on:
            self._protected(call, *given, **named)

    def _asked(self, method: str, call: Callable[[], None]) -> None:
        """Run a method's call; if it raises, print one line and ignore the call."""
        if self._relay:
            self._relay.print_once(f"{method} in a child process is ignored; call it in the parent")

        def done() -> None:
            try:
                call()
            except arguments.BadArgument as error:
                self._complain(f"{method} is ignored: {error}")
            except Exception as error:
                self._complain(f"{method} is ignored: {type(error).__name__}: {error}")

        self._guard(done)

    def _protected(self, call: Callable[..., None], *given: Any, **named: Any) -> None:
        hooks = self._exit_hooks
        hooks.held += 1
        try:
            call(*given, **named)
        except Exception as error:
            self._fail(error)
        finally:  # KeyboardInterrupt propagates
            hooks.held -= 1
        if hooks.is_due and not hooks.held:
            hooks.terminate()

    def _process_ends(
        self, status: WatchedStatus, error: str | None, exit_code: int | None
    ) -> None:
        if status == "finished":
            self._end_after_parts(status, exit_code)
        else:
            self._end(status, error, exit_code)

    def _end(self, status: WatchedStatus, error: str | None, exit_code: int | None = None) -> None:
        if not self._has_ended:
            self._protected(self._finish, status, error, exit_code)

    def _is_superseded(self, *names: object) -> bool:
        """End the run if a call of `watch` starts another; return True if it did.

        A later cell of a notebook starts another run. So does another run's name in a child of
        multiprocessing, for example in a pool's next task.
        """
        if self._queued or self._has_ended:
            return False
        if self._cells.has_ended:
            self._end_after_parts("interrupted")
        elif self._exit_hooks.is_child and self._is_other(*names):
            self._end_after_parts("finished")
        return self._has_ended

    def _end_after_parts(self, status: WatchedStatus, exit_code: int | None = None) -> None:
        """End the run with the error of the last cell or task, if that raised."""
        if self._part_end is not None and self._part_end[0] == self.step:
            _step, part_status, error = self._part_end
            self._end(part_status, error)
        else:
            self._end(status, None, exit_code)

    def _part_raised(self, error: BaseException) -> None:
        """Remember the exception of a notebook cell or pool task; the process continues."""
        status: WatchedStatus = "terminated" if isinstance(error, KeyboardInterrupt) else "failed"
        self._part_end = self.step, status, "".join(traceback.format_exception(error))

    def _finish(self, status: WatchedStatus, error: str | None, exit_code: int | None) -> None:
        is_on = self._is_on
        self._disarm()
        try:
            self._write_rest()
        except Exception as problem:
            if is_on:  # otherwise the error that stopped the watching has occurred again
                self._fail(problem)
        self._spool.close()
        if self._meeting:
            if not self._sidecar:
                ranks.retract(self._meeting, self._written)
            if status in ("failed", "terminated") and ranks.first_error(self._written):
                status, error = "failed", ranks.explained(error, self._written)
        write_outcome(self._written, status, self.step, error, exit_code)
        if self._card:
            with suppress(Exception):  # the notebook may have gone
                self._card.refresh(self._repr_html_())
        self._children.close()
        relay.retract()
        self._lock.release()
        self._exit_hooks.cancel()  # not before: a pool sends SIGTERM while its workers end
        if self._queued:
            self._queued.leave(self.step)
        self._revive()

    def _write_rest(self) -> None:
        try:
            self._loop.close()
            if not self._loop.drain(PATIENCE_SECONDS):
                self._complain(f"the device did not respond within {duration(PATIENCE_SECONDS)}")
        finally:
            if self._cell_output:
                self._cell_output.stop()
        self._receive()
        self._flush()

    def _fail(self, error: Exception) -> None:
        """Stop observing after an internal error; still record the run's real outcome."""
        self._stop_observing()
        text = " ".join(f"{type(error).__name__}: {error}".split())  # one line
        say(f"{text}; the training continues unwatched")
        with suppress(Exception):  # the drain may be what failed
            self._loop.drain(0.0)
        note = FailedDiagnosis(step=self.step, diagnosis="watch", error=text[:1000])
        try:
            self._spool.event(note)
        except (OSError, ValueError):  # the disk failed, or the spool is closed
            return

    def _stop_observing(self) -> None:
        self._is_on = False
        self._taps.disarm()
        self._loop.end()

    def _disarm(self) -> None:
        """Restore torch and Python."""
        global _active
        self._has_ended, _active = True, None
        self._stop_observing()
        self._cells.forget()

    def _called_again(self, *names: object) -> None:
        """Print a line if a second call of `watch` names another run."""
        if not self._queued and self._is_on and self._is_other(*names):
            self._complain(f"{self.folder} continues; call `finish()` before starting another run")

    def _is_other(self, *names: object) -> bool:
        """Return True if the first non-empty name is another run's."""
        first = next((name for name in names if isinstance(name, str) and name), None)
        return first is not None and not is_called(self._written.folder, first)

    def _complain(self, text: str) -> None:
        """Print a line on stderr, once per text and at most 20 texts."""
        if text not in self._complaints and len(self._complaints) < 20:
            self._complaints.add(text)
            say(text)


def _can_show() -> bool:
    """Return whether the service is installed here, which has the command `halfstep show`."""
    from importlib.metadata import PackageNotFoundError, distribution  # only without a server

    try:
        distribution(SERVICE)
    except PackageNotFoundError:
        return False
    return True


def _with_point(config: Any, point: SweepPoint | None) -> Any:
    """Return a run's configuration with the settings of a sweep's point, which win."""
    return merged(config or {}, point.config) if point else config


def _is_column(name: object, value: object) -> bool:
    """Return whether a value is a number of Python or numpy that a step's row may hold."""
    if not isinstance(name, str) or isinstance(value, bool) or not columns_of([name]):
        return False
    if isinstance(value, Integral):
        return abs(int(value)) <= LARGEST_WHOLE
    is_numpys = isinstance(value, Real) and type(value).__module__ == "numpy"
    return is_numpys or isinstance(value, float)


def _after_fork() -> None:
    """Turn the run of a forked process, such as a data loader's worker, into its parent's."""
    global _parents
    if _active is not None:
        _parents = _active
        if _active._is_on and _active.files:
            _active._relay = RelayWriter(_active.files)
        _active._exit_hooks.cancel()
        _active._lock.release()
        _active._disarm()
    if _sidecar:
        _sidecar.leave()


os.register_at_fork(after_in_child=_after_fork)


def _relayed(files: AttemptFiles) -> Watch:
    """Return a child process's handle of a run; in the writing process, the run itself."""
    if _active is not None and _active.files == files:
        return _active
    watch = Watch(None, project=_project_of(files))
    watch._relay = RelayWriter(files)
    return watch


def _project_of(files: AttemptFiles) -> str:
    """Return a run's project: of a queue it is in its job, else in run.json."""
    with suppress(OSError, ValueError):  # a child process may outlive the folder
        if files.job.exists():
            return read_message(files.job, Job).project
        return described_in(files.folder).project or ""
    return ""


def _resumed(step: int, notes: list[str]) -> Resumed:
    return Resumed(step=step, exact=not notes, notes=notes)


def _server(url: str | None, token: str | None) -> Credentials | None:
    """Return the server's credentials; None if there are none or they cannot be read.

    If no server is named, it is the one that runs on this machine; for a queued run only if the run
    is in its data folder.
    """
    try:
        server = credentials.known(url, token)
    except Unreadable as error:
        say(str(error))
        return None
    is_named = url or token or {"HALFSTEP_URL", "HALFSTEP_TOKEN"} & os.environ.keys()
    if server or is_named:
        return server
    queued = queued_files()
    return local_server.running(data_of(queued) if queued else None)


def _keep_rank(
    number: int, folder: Path, secret: str | None, *, console: bool, system: bool
) -> None:
    """Keep output, memory and exception of a further rank for the run of the first one.

    secret: the server's token, which no written file may contain.
    """
    global _sidecar
    captures = arguments.switch("console", console) and not is_interactive()
    samples = arguments.switch("system", system)
    if _sidecar or os.environ.get(QUEUED_FOLDER):  # of a queue: its worker has all output
        return
    meeting = ranks.meeting_file(folder)
    hidden = redaction.values(os.environ) + ([secret] if secret else [])
    ranks.report_exceptions(meeting, number, hidden)
    if captures or samples:
        _sidecar = Sidecar(
            None, captures=captures, samples=samples, hidden=hidden, rank=number, meeting=meeting
        )


def _linked(place: Path, path: Path) -> bool:
    """Hard-link a file; return False if that fails, as across file systems."""
    try:
        place.hardlink_to(path)
    except OSError:
        return False
    return True
