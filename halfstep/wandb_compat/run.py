"""The run that `wandb.init` returns.

Values are logged at the last optimizer step, like those of `Watch.log`, or at the number that the
script has given it. Without observed optimizer steps they are logged at W&B's own counter of calls.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from glob import glob
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, Self

from halfstep.cli.command_sources import is_code
from halfstep.importing.columns import columns_of
from halfstep.session import watch_session
from halfstep.session.logged_values import as_scalar, is_number
from halfstep.session.nesting import flat
from halfstep.session.step_numbers import step_number
from halfstep.telemetry.attempt_messages import RunFile
from halfstep.telemetry.event_fields import AlertLevel
from halfstep.telemetry.plain_json import JsonObject
from halfstep.telemetry.run_folder import last_logged
from halfstep.wandb_compat import artifacts
from halfstep.wandb_compat.artifacts import Artifact
from halfstep.wandb_compat.log_values import show, to_cell
from halfstep.wandb_compat.settings import Entries
from halfstep.wandb_compat.unsupported import Unserved, report_exceptions, report_ignored, say_once

MOST_FILES = 1000  # per `save`
#: Levels of alerts, by what scripts pass.
LEVELS: dict[str, AlertLevel] = {"warn": "warn", "warning": "warn", "error": "error"}
SUMMARIES: Mapping[str, Callable[[float, float], float]] = {"min": min, "max": max}


class Defined(NamedTuple):
    """Return value of `define_metric`, which can be passed as `step_metric`."""

    name: str


class Run:
    """A run, as `wandb.init` returns it. Unknown attributes do nothing."""

    def __init__(
        self,
        watch: watch_session.Watch,
        described: RunFile | None,
        labels: dict[str, Any],
        allow_val_change: bool | None = None,
    ) -> None:
        """described: content of run.json, None if nothing is recorded. labels: W&B's own."""
        self._watch = watch
        self._described = described
        self.config = Entries(
            self._configure, allow_val_change=allow_val_change, locked=watch.sweep_settings
        )
        self.summary = Entries(self._summarise)
        self._name: str = (described and described.name) or labels["name"] or "run"
        self.id: str = (described.id if described else "disabled")[:8]
        self.project: str = (described and described.project) or ""
        self.entity, self.group, self.job_type = (
            labels[name] or "" for name in ("entity", "group", "job_type")
        )
        self._notes: str = labels["notes"] or ""
        self._tags: tuple[str, ...] = tuple(described.tags if described else ())
        self.disabled = watch.files is None
        self.resumed = bool(watch.files and watch.files.attempt > 1)
        watch.step_of_children = self._step_of_children
        if watch._run:
            watch._run.before_end = self._close
        self.step = 0
        self._given: int | None = None  # step of the last call with one
        #: Between W&B's steps, which begin at 0, and ours, if the losses of a script are its steps.
        self._shift = 0
        self._reached: int | None = None  # last step of earlier attempts
        self._has_begun = not self.resumed  # logged, by which it is known whence it continues
        if self.resumed:
            self._log_on()
        self._pending: dict[str, Any] = {}
        self._summaries: dict[str, tuple[str, str]] = {}  # each: pattern and kind of summary
        self._step_metrics: dict[str, str] = {}  # by pattern
        self._latest: dict[str, float] = {}  # latest values of the metrics used as x axes
        self._recorded: int | None = None  # step of the last values; None: the observed one
        self._own: set[str] = set()  # summary entries that the script set itself
        self._is_logging = False
        self._saved: dict[Path, str] = {}  # names of the files in the run
        self.is_finished = False

    @property
    def name(self) -> str:
        """Name of the run; setting it renames the run."""
        return self._name

    @name.setter
    def name(self, name: object) -> None:
        self._name = str(name)
        self._watch.describe(name=self._name)

    @property
    def notes(self) -> str:
        """Note of the run, which can be set."""
        return self._notes

    @notes.setter
    def notes(self, notes: object) -> None:
        self._notes = str(notes or "")
        self._watch.describe(note=self._notes)

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the run, which can be set."""
        return self._tags

    @tags.setter
    def tags(self, tags: Iterable[object] | None) -> None:
        self._tags = (tags,) if isinstance(tags, str) else tuple(map(str, tags or ()))
        self._watch.describe(tags=self._tags)

    @property
    def dir(self) -> str:
        """Folder of the run."""
        return str(self._watch.folder or ".")

    @property
    def path(self) -> str:
        """Entity, project and id, joined by slashes."""
        return "/".join([*filter(None, [self.entity, self.project]), self.id])

    @property
    def url(self) -> str | None:
        """URL of the run's page; None offline, or if the server did not respond at once."""
        return self._watch.page

    def get_url(self) -> str | None:
        """Return `url`."""
        return self.url

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
        if step is not None:
            self._given = step = step_number(step)
            if not self._has_begun:
                self._begin_at(step, data)
            if step < self.step:  # W&B drops these
                self._record(flat(data), step)
                return
            if step > self.step:
                self._flush(None)
            self.step = step
        self._pending.update(flat(data))
        if commit or (commit is None and step is None):
            self._flush(step)
            self.step += 1
        elif step is not None:
            self._flush(step)

    def log_aside(self, data: Mapping[str, Any]) -> None:
        """Log values at the current step, without counting a step."""
        self._report_values(data, self._at(None))

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
            self._step_metrics[name] = str(getattr(step_metric, "name", step_metric))
            self._watch.describe(step_metrics=self._step_metrics)
        for kind in (summary or "").split(","):
            if kind:
                self._summaries[f"{kind} {name}"] = (name, _kind(kind, goal))
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
        matching = sorted(glob(str(glob_str), recursive=True))  # noqa: PTH207 - it may be absolute
        files = [path for path in map(Path, matching) if path.is_file()]
        if not files:
            say_once(f"save({str(glob_str)!r}) matches no file, and nothing is uploaded")
        elif len(files) > MOST_FILES:
            few = f"the first {MOST_FILES:,} of {len(files):,} files"
            say_once(f"save({str(glob_str)!r}) uploads {few}; allowed: at most that many")
        files = files[:MOST_FILES]
        for path in files:
            name = os.path.relpath(path, base_path) if base_path else str(path)
            name = path.name if path.is_absolute() or name.startswith("..") else name
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

        def is_included(path: Path) -> bool:
            is_chosen = (
                is_code(path) if include_fn is None else _call_filter(include_fn, path, base)
            )
            return is_chosen and not (exclude_fn and _call_filter(exclude_fn, path, base))

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
    def _log_on(self) -> None:
        """Continue the counter after the last logged step of an earlier attempt."""
        watch = self._watch
        if watch.step and not watch.has_no_torch:  # its steps are observed
            self._reached = watch.step
            return
        logged = last_logged(watch.files) if watch.files else None
        if watch.step:
            self._reached = self.step = max(watch.step, logged or 0)
            self._shift = 1
        elif logged is not None:
            self._reached, self.step = logged, logged + 1
        if not watch.has_no_torch and self._reached is not None:
            watch.log_on(self._reached)

    def _begin_at(self, step: int | None, data: Mapping[str, Any]) -> None:
        """Report whence a later attempt continues, at its first log.

        step: that the script has logged first; at an earlier one than the last its steps are
        repeated.
        """
        self._has_begun = True
        reached, watch = self._reached, self._watch
        goes_back = step is not None and (reached is None or step <= reached)
        if goes_back and watch.step and not watch.has_no_torch:
            say_once(
                f"log(step={step}): the run has reached step {reached}, and further steps are "
                f"counted from there; allowed: halfstep.watch(model).resume(STEP) after init()"
            )
        elif not watch.has_no_torch:
            return
        elif goes_back:
            self.step = step = int(step or 0)
            if self._has_row(flat(data)):
                watch.resume(max(step - 1, 0))
            else:
                watch.log_on(max(step - 1, 0) if reached is None else reached)
        elif reached is not None:
            watch.log_on(reached)

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
        own = {f"summary/{name}": self.summary[name] for name in self._own}
        for name, entry in self.summary.items():
            if isinstance(entry, dict):  # of `define_metric`
                chosen = {kind: value for kind, value in entry.items() if kind != "count"}
                own |= {f"summary/{name}.{kind}": value for kind, value in chosen.items()}
        last = self._at(None) if self._recorded is None else self._recorded
        self._report_values({n: v for n, v in own.items() if is_number(v)}, last)
        rows = [{"name": name, "value": to_cell(value)} for name, value in self.summary.items()]
        if rows:
            self._report_values({"summary": rows}, last)
        self.is_finished = True

    def _flush(self, step: int | None) -> None:
        if self._pending:
            if step is None and not self.step and self._has_row(self._pending):
                self._shift = 1
            pending, self._pending = self._pending, {}
            self._record(pending, self._at(step))

    def _has_row(self, values: Mapping[str, Any]) -> bool:
        """Return whether a loss of these values, without an x axis of its own, is a step's row."""
        if not self._watch.has_no_torch:
            return False
        has_axis = any(
            fnmatchcase(name, pattern) for pattern in self._step_metrics for name in values
        )
        return not has_axis and "loss" in columns_of(values).values()

    def _record(self, values: Mapping[str, Any], step: int | None) -> None:
        self._watch.makes_rows = self._has_row(values)
        self._report_values(self._axes(values) | dict(values), step)
        self._is_logging, self._recorded = True, step
        for name, value in values.items():
            with suppress(OverflowError):  # no float can hold it; `Watch.log` has said so
                self._note(name, value)
        self._is_logging = False

    def _at(self, step: int | None) -> int | None:
        """Return the step to log at; None: the last observed step.

        Without `step`, the one that the script has given it, whether it counts from 0 or 1.
        """
        if step is not None:
            return step
        is_observed = self._watch.step and not self._watch.has_no_torch
        if is_observed and self._given in (self._watch.step - 1, self._watch.step):
            return self._given
        return None if is_observed or self._watch.is_relayed else self.step + self._shift

    def _step_of_children(self) -> int:
        """Return the step for a call in a child process, which counts like one in this process."""
        if self._watch.step and not self._watch.has_no_torch:
            return self._watch.step
        self.step += 1
        return self.step - 1 + self._shift

    def _report_values(self, values: Mapping[str, Any], step: int | None) -> None:
        shown: dict[str, Any] = {}
        for name, value in values.items():
            try:
                show(shown, name, value)
            except Exception as error:
                say_once(f"{name} is not logged: {type(error).__name__}: {error}")
        if not self._has_begun:
            self._begin_at(None, values)
        self._watch.log(shown, step=step)

    def _note(self, name: str, value: Any) -> None:
        """Store the latest value, or those that `define_metric` selects, in the summary."""
        if not (is_number(value) or isinstance(value, str)) or getattr(value, "is_cuda", False):
            return  # do not wait for the device
        value = value.detach() if hasattr(value, "detach") else value
        value = value if isinstance(value, str | bool) else float(as_scalar(value))
        kinds = [kind for pattern, kind in self._summaries.values() if fnmatchcase(name, pattern)]
        if not kinds or isinstance(value, str):
            self.summary[name] = value
            return
        entry = self.summary.get(name)
        entry = dict(entry) if isinstance(entry, dict) else {}
        for kind in kinds:
            if kind == "mean":
                count = entry.get("count", 0) + 1
                entry |= {"mean": entry.get("mean", 0.0) * (1 - 1 / count) + value / count}
                entry["count"] = count
            elif kind == "last":
                entry["last"] = value
            elif kind in SUMMARIES:
                entry[kind] = SUMMARIES[kind](entry.get(kind, value), value)
        if entry:
            self.summary[name] = entry

    def _axes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the latest x-axis values of these metrics; W&B adds them too."""
        axes = {
            metric
            for pattern, metric in self._step_metrics.items()
            if any(fnmatchcase(name, pattern) for name in values)
        }
        for metric in {*self._step_metrics.values()} & values.keys():
            if is_number(values[metric]):
                self._latest[metric] = values[metric]
        return {metric: self._latest[metric] for metric in axes & self._latest.keys()}

    def _summarise(self, changed: JsonObject) -> None:
        if not self._is_logging:
            self._own |= changed.keys()

    def _configure(self, _changed: dict[str, Any]) -> None:
        if self._watch.files is not None:
            self._watch.configure(self.config.as_dict())


def _kind(summary: str, goal: str | None) -> str:
    if summary == "best":
        return "max" if goal and goal.startswith("max") else "min"
    return summary


def _call_filter(chooses: Callable[..., bool], path: Path, root: str) -> bool:
    """Call a function of `log_code`, which takes a path, and the root if it has a place for it."""
    takes_root = len(signature(chooses).parameters) > 1
    return bool(chooses(str(path), root) if takes_root else chooses(str(path)))
