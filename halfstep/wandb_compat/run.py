"""The run that `wandb.init` returns.

What is logged stands at the last optimizer step, as `Watch.log` has it; in a script without any
that is heard, at W&B's own counter of calls.
"""

import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple, Self

from halfstep.session import watch_session
from halfstep.session.logged_values import as_scalar, is_number
from halfstep.session.nesting import flat
from halfstep.session.stderr import say
from halfstep.telemetry.run_folder import last_logged, slug
from halfstep.wandb_compat.log_values import show, worded
from halfstep.wandb_compat.settings import Entries
from halfstep.wandb_compat.unsupported import Unserved, ignored, say_once, unraised

MOST_FILES = 1000  # of one `save`
SUMMARIES: Mapping[str, Callable[[float, float], float]] = {"min": min, "max": max}


class Defined(NamedTuple):
    """What `define_metric` returns, to be named as a `step_metric`."""

    name: str


class Run:
    """A run, as `wandb.init` returns it. Whatever it does not know does nothing."""

    def __init__(
        self, watch: watch_session.Watch, described: dict[str, Any], labels: dict[str, Any]
    ) -> None:
        """described: as run.json has it, empty if nothing is written. labels: W&B's own."""
        self._watch = watch
        self._described = described
        self.config = Entries(self._configure)
        self.summary = Entries(self._summarise)
        self.name: str = described.get("name") or labels["name"] or "run"
        self.id: str = described.get("id", "disabled")[:8]
        self.project: str = described.get("project") or ""
        self.entity, self.group, self.job_type = (
            labels[name] or "" for name in ("entity", "group", "job_type")
        )
        self.notes: str = labels["notes"] or ""
        self.tags: tuple[str, ...] = tuple(described.get("tags", ()))
        self.disabled = watch.files is None
        self.resumed = bool(watch.files and watch.files.attempt > 1)
        watch.step_of_children = self._step_of_children
        self.step = 0
        if self.resumed and not watch.step:
            self._log_on()
        self._pending: dict[str, Any] = {}
        self._wanted: dict[str, tuple[str, str]] = {}  # by pattern: which summary, which goal
        self._step_metrics: dict[str, str] = {}  # by pattern
        self._latest: dict[str, float] = {}  # of the metrics that x axes count
        self._own: set[str] = set()  # of the summary, what the script set itself
        self._is_logging = False
        self._saved: dict[Path, None] = {}  # in order
        self.is_finished = False

    @property
    def dir(self) -> str:
        """Where it lies."""
        return str(self._watch.folder or ".")

    @property
    def url(self) -> str | None:
        """Where it is to be seen; None offline, and of a server that did not answer at once."""
        return self._watch.page

    def get_url(self) -> str | None:
        """Return the same."""
        return self.url

    @unraised
    def log(
        self,
        data: Mapping[str, Any],
        step: int | None = None,
        commit: bool | None = None,
        sync: bool | None = None,
    ) -> None:
        """Log numbers, texts, images, tables and histograms. commit: False waits for more."""
        if self.is_finished:
            say_once("log() after finish() is passed over")
            return
        if step is not None:
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

    @unraised
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
        """Choose which value of a metric stands in the summary, and which metric its x axis counts.

        summary: min, max, mean, best, last or none.
        """
        if step_metric is not None:
            self._step_metrics[name] = str(getattr(step_metric, "name", step_metric))
            self.config["step_metric"] = dict(self._step_metrics)
        for kind in (summary or "").split(","):
            if kind:
                self._wanted[f"{kind} {name}"] = (name, _kind(kind, goal))
        return Defined(name)

    @unraised
    def watch(
        self,
        models: Any,
        criterion: Any = None,
        log: str | None = "gradients",
        log_freq: int = 1000,
        idx: int | None = None,
        log_graph: bool = False,
    ) -> Any:
        """Name parameters as these modules do; norms and culprits are recorded of each step."""
        if log in ("parameters", "all"):
            say_once("watch(log='parameters') is not served: gradients are what is recorded")
        ignored("watch", {"log_graph": log_graph})
        several = models if isinstance(models, list | tuple) else [models]
        self._watch.add(*several)
        return self._watch

    def unwatch(self, models: Any = None) -> None:
        """Do nothing: what is recorded costs microseconds."""

    @unraised
    def alert(
        self, title: str, text: str = "", level: Any = None, wait_duration: Any = None
    ) -> None:
        """Say it on stderr, and keep it with the run."""
        words = f"{title}: {text}" if text else title
        say(f"alert: {words}")
        self._tell({f"alert-{title}": words}, self._at(None))

    @unraised
    def save(
        self, glob_str: Any = None, base_path: Any = None, policy: str = "live"
    ) -> list[str] | bool:
        """Send files along. policy: "now"; of "live" and "end", as they are at the run's end."""
        if glob_str is None:
            return True
        matching = sorted(glob(str(glob_str), recursive=True))  # noqa: PTH207 - it may be absolute
        found = [path for path in map(Path, matching[:MOST_FILES]) if path.is_file()]
        for path in found:
            if policy == "now":
                self._watch.checkpoint(path, kind=_kind_of(path), upload=True)
            else:
                self._saved[path.absolute()] = None
        return [str(path) for path in found]

    @unraised
    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        """End the run. exit_code: other than 0, and it failed."""
        self._close()
        if exit_code:
            self._watch.__exit__(SystemExit, SystemExit(exit_code), None)
        else:
            self._watch.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self._close()
        self._watch.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Unserved(f"run.{name}")

    # ---- What is told ---------------------------------------------------------------------------

    @unraised
    def _log_on(self) -> None:
        """Count on from what an earlier attempt logged, which made no step."""
        files = self._watch.files
        logged = last_logged(files) if files else None
        if logged is not None:
            self.step = logged + 1
            self._watch.log_on(logged)

    @unraised
    def _close(self) -> None:
        if self.is_finished:
            return
        self._flush(None)
        if self._watch.is_relayed:  # the run is the parent's to end
            self.is_finished = True
            return
        for path in self._saved:
            if path.is_file():
                self._watch.checkpoint(path, kind=_kind_of(path), upload=True)
        own = {f"summary/{name}": self.summary[name] for name in self._own}
        self._tell({n: v for n, v in own.items() if is_number(v)}, self._at(None))
        rows = [{"name": name, "value": worded(value)} for name, value in self.summary.items()]
        if rows:
            self._tell({"summary": rows}, self._at(None))
        self.is_finished = True

    def _flush(self, step: int | None) -> None:
        if self._pending:
            pending, self._pending = self._pending, {}
            self._record(pending, self._at(step))

    def _record(self, values: Mapping[str, Any], step: int | None) -> None:
        self._tell(self._axes(values) | dict(values), step)
        self._is_logging = True
        for name, value in values.items():
            self._note(name, value)
        self._is_logging = False

    def _at(self, step: int | None) -> int | None:
        """Return which step something is of; None: the last one that was heard."""
        if step is not None:
            return step
        return None if self._watch.step or self._watch.is_relayed else self.step

    def _step_of_children(self) -> int:
        """Return the step of a child process's call, which counts as one of this process."""
        if self._watch.step:
            return self._watch.step
        self.step += 1
        return self.step - 1

    def _tell(self, values: Mapping[str, Any], step: int | None) -> None:
        shown: dict[str, Any] = {}
        for name, value in values.items():
            try:
                show(shown, name, value)
            except Exception as error:
                say_once(f"{name} is not logged: {type(error).__name__}: {error}")
        self._watch.log(shown, step=step)

    def _note(self, name: str, value: Any) -> None:
        """Keep the last value, or the one that `define_metric` wants, in the summary."""
        if not (is_number(value) or isinstance(value, str)) or getattr(value, "is_cuda", False):
            return  # what lies on a device is not waited for
        value = value.detach() if hasattr(value, "detach") else value
        value = value if isinstance(value, str | bool) else float(as_scalar(value))
        wanted = [kind for pattern, kind in self._wanted.values() if fnmatchcase(name, pattern)]
        if not wanted or isinstance(value, str):
            self.summary[name] = value
            return
        kept = self.summary.get(name)
        kept = dict(kept) if isinstance(kept, dict) else {}
        for kind in wanted:
            if kind == "mean":
                count = kept.get("count", 0) + 1
                kept |= {"mean": kept.get("mean", 0.0) * (1 - 1 / count) + value / count}
                kept["count"] = count
            elif kind == "last":
                kept["last"] = value
            elif kind in SUMMARIES:
                kept[kind] = SUMMARIES[kind](kept.get(kind, value), value)
        if kept:
            self.summary[name] = kept

    def _axes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return where values stand on their x axes, as was logged last; W&B adds that too."""
        axes = {
            metric
            for pattern, metric in self._step_metrics.items()
            if any(fnmatchcase(name, pattern) for name in values)
        }
        for metric in {*self._step_metrics.values()} & values.keys():
            if is_number(values[metric]):
                self._latest[metric] = values[metric]
        return {metric: self._latest[metric] for metric in axes & self._latest.keys()}

    def _summarise(self, changed: dict[str, Any]) -> None:
        if not self._is_logging:
            self._own |= changed.keys()

    def _configure(self, _changed: dict[str, Any]) -> None:
        if self._watch.files is not None:
            self._watch.configure(self.config.as_dict())


def _kind(summary: str, goal: str | None) -> str:
    if summary == "best":
        return "max" if goal and goal.startswith("max") else "min"
    return summary


def _kind_of(path: Path) -> str:
    """Name a file of several that are saved at one step, each kept by itself."""
    name = os.path.relpath(path).replace(os.sep, ".")
    return f"weights.{slug(name).replace('.', '-')[:90]}"
