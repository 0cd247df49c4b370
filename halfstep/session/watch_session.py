"""Handle of a watched run, through which a script logs to it."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from msgspec import UNSET, UnsetType

from halfstep.api_client.credentials import Credentials
from halfstep.cli.command_sources import is_code
from halfstep.session import active_run, arguments, ranks
from halfstep.session.queued_run import project_of
from halfstep.session.run_labels import RunLabels
from halfstep.session.run_upload import server_of
from halfstep.session.stderr import say
from halfstep.session.step_numbers import BadArgument, step_number
from halfstep.session.watched_run import WatchedRun
from halfstep.telemetry import relay
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.event_fields import AlertLevel
from halfstep.telemetry.relay import RelayWriter
from halfstep.telemetry.run_folder import read_description, script_name, slug

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from halfstep.precision_lab.report import PrecisionReport
    from halfstep.session.artifacts import SavedVersion

T = TypeVar("T")

#: Methods whose data are lost in a further rank.
RECORDING = {"log", "checkpoint", "save_file", "save_artifact", "save_code", "precision_diff"}
RECORDING |= {"alert", "describe"}


class Watch:
    """A watched run, also a context manager; it ends with the script or at `finish()`."""

    def __init__(
        self,
        run: WatchedRun | None,
        *,
        server: Credentials | None = None,
        is_offline: bool = False,
        project: str | None = None,
        named: tuple[str | None, str | None] = (None, None),
        runs_of_rank: Path | None = None,
    ) -> None:
        """Hold a run of this process; None: nothing is watched, and every method does nothing.

        is_offline: no server is asked for artifacts.  Without a run, for the artifacts that it
        uses: project; server; named: URL and token of the server, without `server`.
        runs_of_rank: in a further rank, whose calls do nothing: the folder of runs.
        """
        self._run, self.files = run, run.files if run else None
        self._labels = RunLabels(self.files.folder if self.files else None)
        self._is_offline = is_offline
        self._server_without_run, self._project_without_run = server, project or ""
        self._named, self._runs_of_rank = named, runs_of_rank
        self._ignored: set[str] = set()  # methods
        self._relay: RelayWriter | None = None  # in a child process
        self.sweep_settings: dict[str, object] = {}  # of the sweep's point, if an agent started it
        self.has_no_torch = run is not None and run.has_no_torch
        #: Whether a logged loss is the row of its step; see `has_no_torch`.
        self.makes_rows = False
        if run:
            self._loop = run.loop
            #: Returns the step for numbers that a child process logs without one.
            self.step_of_children: Callable[[], int] = run.values.last_step
            run.values.step_of_children = lambda: self.step_of_children()

    @property
    def folder(self) -> Path | None:
        """The run's folder; None if nothing is watched."""
        return self.files.folder if self.files else None

    @property
    def page(self) -> str | None:
        """URL of the run's page; it leads there once the server has the run."""
        return self._run.page if self._run else None

    def _repr_html_(self) -> str:
        """Return the run's card, for notebooks; it is updated while the run goes on."""
        return self._run.html() if self._run else "<div>Nothing is watched.</div>"

    def _ipython_display_(self) -> None:
        """Display the card in a notebook, and keep it up to date."""
        card = self._run.card if self._run else None
        if card is None or not card.show(self._repr_html_()):
            print(repr(self))  # noqa: T201 - as IPython does without this method

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration, with the settings of a sweep's point; empty if unwatched."""
        if self._run is None or self._run.queued:
            return {}
        return dict(read_description(self._run.files.folder).config or {})

    @property
    def is_relayed(self) -> bool:
        """True in a child process, whose parent writes the run."""
        return self._relay is not None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as the handle by which a spawned child logs to the run."""
        return (Watch, (None,)) if self.files is None else (_relay, (self.files,))

    @property
    def step(self) -> int:
        """The number of attempted steps."""
        return self._run.loop.step if self._run else 0

    def add(self, *modules: "nn.Module") -> None:
        """Name parameters as these modules do."""
        self._ask("add", lambda run: run.loop.add(arguments.modules(modules)))

    def is_superseded(self, *names: object) -> bool:
        """End the run if a call with these names starts another; return True if it did."""
        run = None if self.is_relayed else self._run
        return run is not None and run.outcome.is_superseded(*names)

    def configure(self, config: object) -> None:
        """Replace the run's configuration."""
        self._ask("configure", lambda run: run.configure(config))

    def resume(self, step: int, *, exact: bool = False) -> None:
        """Set the step that the script resumes from: the next step is that plus 1.

        exact: the script restored all of its state.
        """
        self._ask("resume", lambda run: run.resume(step_number(step), exact=exact))

    def log_on(self, step: int) -> None:
        """Continue the log of a run without training steps after this step.

        Values already logged for later steps are replaced.
        """
        self._ask("log_on", lambda run: run.log_on(step_number(step)))

    def loss(self, loss: "Tensor | float") -> None:
        """Record the current step's loss, if it differs from the tensor that is scaled.

        Several calls in a step are averaged. A tensor is read together with the step's row.
        """
        self._ask("loss", lambda run: run.loop.add_loss(arguments.loss(loss)))

    def log(self, values: Mapping[str, object], *, step: int | None = None) -> None:
        """Log numbers, texts, images, figures, tables or histograms for a step.

        A number on the device is copied to the host without waiting; an image on the device is
        waited for.  Names within a nested dictionary are joined by "/".  step: the last one by
        default; in a script without optimizer steps each call that repeats a name begins the next.
        A child process can log only numbers, by default for the parent's last step.
        """
        if self._relay:
            self._relay.log(values, step)
            return

        def log(run: WatchedRun) -> None:
            at = None if step is None else step_number(step)
            run.log(values, at, makes_row=self.makes_rows)

        self._ask("log", log)

    def checkpoint(
        self, path: str | Path, *, kind: str = "checkpoint", upload: bool = False
    ) -> None:
        """Register a file with its size and SHA-256, and link it into the run's folder.

        kind: "checkpoint", "weights" or "weights.<module>".  upload: copy the file into the folder
        and upload it, for download from the run's page.  Returns once the file is read.
        """

        def register(run: WatchedRun) -> None:
            run.stored.checkpoint(Path(path), self.step, kind, upload=upload)

        self._ask("checkpoint", register)

    def save_file(self, path: str | Path, *, name: str | None = None) -> None:
        """Copy a file into the run's files, at the last step.

        name: by default that of the file.  Returns once the file is read.
        """
        self._ask("save_file", lambda run: run.save_file(Path(path), name))

    def alert(
        self, title: str, text: str = "", *, level: AlertLevel = "info", wait_seconds: float = 60.0
    ) -> None:
        """Alert the owner of the run, on the page of alerts and by the channels that are on.

        wait_seconds: for which further alerts of this title are ignored.
        """
        self._ask("alert", lambda run: run.alert(title, text, level, wait_seconds))

    def describe(
        self,
        *,
        name: str | UnsetType = UNSET,
        note: str | UnsetType = UNSET,
        tags: Sequence[str] | UnsetType = UNSET,
        step_metrics: Mapping[str, str] | UnsetType = UNSET,
    ) -> None:
        """Set name, note and tags of the run, unless a user has, and the x axes of its charts.

        step_metrics: {"val/*": "epoch"}, by pattern of the metrics' names; "*" for all.
        """
        described = self._labels.change(name, note, tags, step_metrics)
        self._ask("describe", lambda run: run.spool.event(described))

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
        return self._ask(
            "precision_diff", lambda run: run.diffs.make(closure, dtype, scale, reference)
        )

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
        return self._ask(
            "save_artifact", lambda run: run.stored.save_artifact(path, name, type, aliases)
        )

    def save_code(
        self,
        root: str | Path | None = None,
        *,
        name: str | None = None,
        is_included: Callable[[Path], bool] = is_code,
    ) -> "SavedVersion | None":
        """Save the code below a folder as a version of an artifact of the type "code".

        root: by default the folder of the script.  name: by default that of the script, with
        "code-" before it.  is_included: by default Python, shell, YAML and TOML files.  At most
        1,000 files of 1 MB; hidden folders, virtual environments and folders of runs are left out.
        """

        def save(run: WatchedRun) -> "SavedVersion | None":
            from halfstep.session.artifacts import code_files

            files = code_files(root, is_included)
            named = name or slug(f"code-{script_name()}")
            return run.stored.save_artifact(files, named, "code", ())

        return self._ask("save_code", save)

    def use(self, reference: str) -> Path:
        """Return the local files of an artifact's version, which this run uses: "data:v3".

        They are downloaded from the server unless they are in the cache, and verified: a folder,
        or the file that was saved as one, both read-only.  Also: "data" for the latest version,
        "data:best" by alias, "project/data:v3".  Raises ArtifactError or ApiError without them.
        """
        from halfstep.session import artifacts

        project = project_of(self.files) if self.files else self._project_without_run
        server = self._run.upload.server if self._run else self._server_without_run
        if server is None and not self._is_offline:
            server = server_of(*self._named)
        path, event = artifacts.use(reference, project=project, server=server, say=say)
        if self._run and not self._relay:
            self._run.guard.call(self._run.spool.event, event)
        return path

    def finish(self) -> None:
        """End the run: fetch what is still on the device, and restore torch and the output."""
        if self._run:
            self._run.outcome.finish()
            if self._run.sidecar:
                self._run.sidecar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        if kind is None:
            self.finish()
        elif self._run:
            self._run.outcome.exit_hooks.on_exception(kind, error, trace)

    def _ask(self, method: str, call: Callable[[WatchedRun], T]) -> T | None:
        """Run a method's call, if a run is watched; if it raises, print one line and ignore it."""
        if self._relay:
            self._relay.print_once(f"{method} in a child process is ignored; call it in the parent")

        def done(run: WatchedRun) -> T | None:
            try:
                return call(run)
            except BadArgument as error:
                run.guard.complain(f"{method} is ignored: {error}")
            except Exception as error:
                run.guard.complain(f"{method} is ignored: {type(error).__name__}: {error}")
            return None

        if self._runs_of_rank and method in RECORDING - self._ignored:
            self._ignored.add(method)
            text = f"{method} is ignored in ranks other than 0, which records the run"
            ranks.say_once(self._runs_of_rank, text)
        return self._run.guard.call(done, self._run) if self._run else None

    def _guard(self, call: Callable[..., None], *given: object, **named: object) -> None:
        """Call a function of an adapter; if it raises, print one line and stop watching."""
        if self._run:
            self._run.guard.call(call, *given, **named)


def current() -> Watch | None:
    """Return this process's run, or in a multiprocessing child its parent's."""
    if (
        active_run.active is None
        and active_run.parents is None
        and (files := relay.find_announced())
    ):
        active_run.parents = _relay(files)
    return active_run.active or active_run.parents


def _relay(files: AttemptFiles) -> Watch:
    """Return a child process's handle of a run; in the writing process, the run itself."""
    if active_run.active is not None and active_run.active.files == files:
        return active_run.active
    watch = Watch(None, project=project_of(files))
    watch._relay = RelayWriter(files)
    return watch


def _after_fork() -> None:
    """Turn the run of a forked process, such as a data loader's worker, into its parent's."""
    watch = active_run.active
    if watch is not None and watch._run:
        active_run.parents = watch
        if watch._run.guard.is_on:
            watch._relay = RelayWriter(watch._run.files)
        watch._run.leave()


os.register_at_fork(after_in_child=_after_fork)
