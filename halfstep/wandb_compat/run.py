"""The run that `wandb.init` returns.

Values are logged at the last optimizer step, like those of `Watch.log`, or at the number that the
script has given it. Without observed optimizer steps they are logged at W&B's own counter of calls.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from halfstep.importing.columns import columns_of
from halfstep.session import watch_session
from halfstep.session.nesting import flat
from halfstep.telemetry.attempt_messages import RunFile
from halfstep.telemetry.event_fields import AlertLevel
from halfstep.wandb_compat import artifacts, saved_files
from halfstep.wandb_compat.artifacts import Artifact
from halfstep.wandb_compat.identity import Identity
from halfstep.wandb_compat.log_values import show
from halfstep.wandb_compat.settings import Entries
from halfstep.wandb_compat.step_counter import StepCounter
from halfstep.wandb_compat.summary import Summary
from halfstep.wandb_compat.unsupported import Unserved, report_exceptions, report_ignored, say_once
from halfstep.wandb_compat.x_axes import XAxes

#: Levels of alerts, by what scripts pass.
LEVELS: dict[str, AlertLevel] = {"warn": "warn", "warning": "warn", "error": "error"}


class Defined(NamedTuple):
    """Return value of `define_metric`, which can be passed as `step_metric`."""

    name: str


class Run(Identity):
    """A run, as `wandb.init` returns it. Unknown attributes do nothing."""

    def __init__(
        self,
        watch: watch_session.Watch,
        described: RunFile | None,
        labels: Mapping[str, str | None],
        allow_val_change: bool | None = None,
    ) -> None:
        """described: content of run.json, None if nothing is recorded. labels: W&B's own."""
        super().__init__(watch, described, labels)
        self.config = Entries(
            self._configure, allow_val_change=allow_val_change, locked=watch.sweep_settings
        )
        self.disabled = watch.files is None
        self.resumed = bool(watch.files and watch.files.attempt > 1)
        self._steps = StepCounter(watch, is_resumed=self.resumed)
        watch.step_of_children = self._steps.count_for_child
        if watch._run:
            watch._run.before_end = self._close
        self._pending: dict[str, Any] = {}
        self._summary, self._axes = Summary(), XAxes()
        self.summary = self._summary.entries
        self._recorded: int | None = None  # step of the last values; None: the observed one
        self._saved: dict[Path, str] = {}  # names of the files in the run
        self.is_finished = False

    @property
    def step(self) -> int:
        """Number of the next step, by W&B's counter."""
        return self._steps.step

    @report_exceptions
    def log(
        self,
        data: Mapping[str, Any],
        step: int | None = None,
        commit: bool | None = None,
        sync: bool | None = None,
    ) -> None:
        """Log numbers, texts, images, tables and histograms. commit: False collects values."""
        if self.is_finished:
            say_once("log() after finish() is ignored")
            return
        steps = self._steps
        if step is not None:
            step = steps.take(step)
            if not steps.has_begun:
                steps.begin(step, makes_row=self._has_row(flat(data)))
            if step < steps.step:  # W&B drops these
                self._record(flat(data), step)
                return
            if step > steps.step:
                self._flush(None)
            steps.step = step
        self._pending.update(flat(data))
        if commit or (commit is None and step is None):
            self._flush(step)
            steps.step += 1
        elif step is not None:
            self._flush(step)

    def log_aside(self, data: Mapping[str, Any]) -> None:
        """Log values at the current step, without counting a step."""
        self._report_values(data, self._steps.find_step())

    def log_at(self, data: Mapping[str, Any], step: int) -> None:
        """Log values at a step of their own, without counting one."""
        self._flush(None)
        self._record(data, step)

    @report_exceptions
    def define_metric(
        self,
        name: str = "*",
        step_metric: Any = None,
        step_sync: bool | None = None,
        hidden: bool | None = None,
        summary: str | None = None,
        goal: str | None = None,
        overwrite: bool | None = None,
    ) -> "Defined":
        """Choose which value of a metric is in the summary, and which metric is its x axis.

        summary: min, max, mean, best, last or none.
        """
        if step_metric is not None:
            self._axes.by_pattern[name] = str(getattr(step_metric, "name", step_metric))
            self._watch.describe(step_metrics=self._axes.by_pattern)
        self._summary.define(name, summary or "", goal)
        return Defined(name)

    @report_exceptions
    def watch(
        self,
        models: Any,
        criterion: Any = None,
        log: str | None = "gradients",
        log_freq: int = 1000,
        idx: int | None = None,
        log_graph: bool = False,
    ) -> Any:
        """Name parameters as these modules do; norms and culprits are always recorded."""
        if log in ("parameters", "all"):
            say_once(f"watch(log={log!r}): only gradients are recorded, not parameters")
        report_ignored("watch", {"log_graph": log_graph})
        several = models if isinstance(models, list | tuple) else [models]
        self._watch.add(*several)
        return self._watch

    def unwatch(self, models: Any = None) -> None:
        """Do nothing: recording costs only microseconds."""

    @report_exceptions
    def alert(
        self, title: str, text: str = "", level: Any = None, wait_duration: Any = None
    ) -> None:
        """Alert the owner of the run. wait_duration: seconds, or a timedelta; a minute by default.

        Further alerts of the same title are ignored for that time.
        """
        word = str(getattr(level, "value", level) or "info").lower()
        seconds = getattr(wait_duration, "total_seconds", lambda: wait_duration)()
        self._watch.alert(
            title,
            text,
            level=LEVELS.get(word, "info"),
            wait_seconds=60.0 if seconds is None else float(seconds),
        )

    @report_exceptions
    def save(
        self, glob_str: Any = None, base_path: Any = None, policy: str = "live"
    ) -> list[str] | bool:
        """Upload files. policy: "now"; or "live" and "end", both at the end of the run.

        base_path: the folder that their names begin below, by default the current one.
        """
        if glob_str is None:
            return True
        files = saved_files.find_files(str(glob_str), base_path)
        for path, name in files.items():
            if policy == "now":
                self._watch.save_file(path, name=name)
            else:
                self._saved[path.absolute()] = name
        return [str(path) for path in files]

    @report_exceptions
    def log_artifact(
        self,
        artifact_or_path: Any,
        name: str | None = None,
        type: str | None = None,  # noqa: A002 - W&B's name for it
        aliases: Sequence[str] | None = None,
        tags: Sequence[str] | None = None,
    ) -> Artifact:
        """Log an artifact, or a file or folder as one."""
        return artifacts.log_artifact(self._watch, self.id, artifact_or_path, name, type, aliases)

    def use_artifact(
        self,
        artifact_or_name: Any,
        type: str | None = None,  # noqa: A002
        aliases: Any = None,
        use_as: str | None = None,
    ) -> Artifact:
        """Return a version that this run uses; raises wandb.Error without it."""
        return artifacts.use_artifact(self._watch, artifact_or_name, type)

    @report_exceptions
    def log_code(
        self,
        root: str | Path | None = ".",
        name: str | None = None,
        include_fn: Callable[..., bool] | None = None,
        exclude_fn: Callable[..., bool] | None = None,
    ) -> Any:
        """Save the code below a folder as an artifact of the type "code"."""
        base = str(Path(root or ".").absolute())
        is_included = saved_files.filter_code(base, include_fn, exclude_fn)
        return self._watch.save_code(base, name=name, is_included=is_included)

    def log_model(
        self, path: str | Path, name: str | None = None, aliases: Sequence[str] | None = None
    ) -> None:
        """Log a file or folder as an artifact of the type "model"."""
        self.log_artifact(path, name, "model", aliases)

    def use_model(self, name: str) -> str:
        """Return the local path of a model: a file if it is one, else a folder."""
        used = self.use_artifact(name)
        names = list(used._paths())
        return used.file() if len(names) == 1 else used.download()

    @report_exceptions
    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        """End the run. exit_code: other than 0 if it failed."""
        if exit_code:
            self._watch.__exit__(SystemExit, SystemExit(exit_code), None)
        else:
            self._watch.finish()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self._watch.__exit__(kind, error, trace)
        self._close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Unserved(f"run.{name}")

    # ---- Recording ------------------------------------------------------------------------------

    @report_exceptions
    def _close(self) -> None:
        if self.is_finished:
            return
        self._flush(None)
        if self._watch.is_relayed:  # the parent ends the run
            self.is_finished = True
            return
        for path, name in self._saved.items():
            self._watch.save_file(path, name=name)
        last = self._steps.find_step() if self._recorded is None else self._recorded
        self._report_values(self._summary.read_numbers(), last)
        if rows := self._summary.list_rows():
            self._report_values({"summary": rows}, last)
        self.is_finished = True

    def _flush(self, step: int | None) -> None:
        if self._pending:
            if step is None and not self.step and self._has_row(self._pending):
                self._steps.shift = 1
            pending, self._pending = self._pending, {}
            self._record(pending, self._steps.find_step(step))

    def _has_row(self, values: Mapping[str, Any]) -> bool:
        """Return whether a loss of these values, without an x axis of its own, is a step's row."""
        if not self._watch.has_no_torch:
            return False
        return not self._axes.find(values) and "loss" in columns_of(values).values()

    def _record(self, values: Mapping[str, Any], step: int | None) -> None:
        self._watch.makes_rows = self._has_row(values)
        self._report_values(self._axes.record(values) | dict(values), step)
        self._recorded = step
        self._summary.record(values)

    def _report_values(self, values: Mapping[str, Any], step: int | None) -> None:
        shown: dict[str, Any] = {}
        for name, value in values.items():
            try:
                show(shown, name, value)
            except Exception as error:
                say_once(f"{name} is not logged: {type(error).__name__}: {error}")
        if not self._steps.has_begun:
            self._steps.begin()
        self._watch.log(shown, step=step)

    def _configure(self, _changed: dict[str, Any]) -> None:
        if self._watch.files is not None:
            self._watch.configure(self.config.as_dict())
