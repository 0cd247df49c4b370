"""`wandb.init` and the run that it returns.

What is logged stands at the last optimizer step, as `Watch.log` has it; in a script without any
that is heard, at W&B's own counter of calls.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path
from typing import Any, Self

from halfstep import watching
from halfstep.dropin.media import Histogram, Image, Table
from halfstep.dropin.settings import Entries, entries_of
from halfstep.dropin.unserved import Unserved, ignored, say_once, unraised
from halfstep.logged import is_number
from halfstep.run_folder import configure, last_logged, read_run

MODES = {"online": "auto", "shared": "auto", "offline": "offline", "dryrun": "offline"}
MODES |= {"disabled": "disabled", "run": "auto"}
MOST_FILES = 1000  # of one `save`
SUMMARIES: Mapping[str, Callable[[float, float], float]] = {"min": min, "max": max}

active: "Run | None" = None
early = Entries()  # what is configured before `init`


class Run:
    """A run, as `wandb.init` returns it. Whatever it does not know does nothing."""

    def __init__(
        self, watch: watching.Watch, described: dict[str, Any], labels: dict[str, Any]
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
        self.step = 0
        if self.resumed and not watch.step:
            self._log_on()
        self._pending: dict[str, Any] = {}
        self._wanted: dict[str, tuple[str, str]] = {}  # by pattern: which summary, which goal
        self._own: set[str] = set()  # of the summary, what the script set itself
        self._is_logging = False
        self._saved: dict[Path, tuple[float, int]] = {}
        self._is_finished = False

    @property
    def dir(self) -> str:
        """Where it lies."""
        return str(self._watch.folder or ".")

    @property
    def url(self) -> str | None:
        """Where it is to be seen: stderr says."""
        return None

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
        """Tell numbers, texts, images, tables and histograms. commit: False waits for more."""
        if self._is_finished:
            say_once("log() after finish() is passed over")
            return
        if step is not None:
            if step < self.step:
                say_once(f"log(step={step}) is passed over: steps cannot go back from {self.step}")
                return
            if step > self.step:
                self._flush(None)
            self.step = step
        self._pending.update(_flat(data))
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
    ) -> None:
        """Say which value of a metric stands in the summary: min, max, mean, best, last or none."""
        if step_metric is not None:
            say_once("define_metric(step_metric=…) is not served: charts go by steps")
        for kind in (summary or "").split(","):
            if kind:
                self._wanted[f"{kind} {name}"] = (name, _kind(kind, goal))

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
        sys.stderr.write(f"halfstep: alert: {words}\n")
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
                self._watch.checkpoint(path, upload=True)
            else:
                self._saved[path.absolute()] = (0.0, -1)
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
        global active
        if self._is_finished:
            return
        self._flush(None)
        for path in self._saved:
            if path.is_file():
                self._watch.checkpoint(path, upload=True)
        own = {f"summary/{name}": self.summary[name] for name in self._own}
        self._tell({n: v for n, v in own.items() if is_number(v)}, self._at(None))
        rows = [{"name": name, "value": _worded(value)} for name, value in self.summary.items()]
        if rows:
            self._tell({"summary": rows}, self._at(None))
        self._is_finished = True
        if active is self:
            active = None

    def _flush(self, step: int | None) -> None:
        if self._pending:
            pending, self._pending = self._pending, {}
            self._tell(pending, self._at(step))
            self._is_logging = True
            for name, value in pending.items():
                self._note(name, value)
            self._is_logging = False

    def _at(self, step: int | None) -> int | None:
        """Return which step something is of; None: the last one that was heard."""
        if step is not None:
            return step
        return None if self._watch.step else self.step

    def _tell(self, values: Mapping[str, Any], step: int | None) -> None:
        shown: dict[str, Any] = {}
        for name, value in values.items():
            _show(shown, name, value.detach() if hasattr(value, "detach") else value)
        self._watch.log(shown, step=step)

    def _note(self, name: str, value: Any) -> None:
        """Keep the last value, or the one that `define_metric` wants, in the summary."""
        if not (is_number(value) or isinstance(value, str)) or getattr(value, "is_cuda", False):
            return  # what lies on a device is not waited for
        value = value.detach() if hasattr(value, "detach") else value
        value = value if isinstance(value, str | bool) else float(value)
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

    def _summarise(self, changed: dict[str, Any]) -> None:
        if not self._is_logging:
            self._own |= changed.keys()

    def _configure(self, _changed: dict[str, Any]) -> None:
        if self._watch.files is not None:
            configure(self._watch.files.folder, self.config.as_dict(), self._watch.secret)


# ---- The module's own functions -----------------------------------------------------------------


def served(name: str) -> Any:
    """Return what `halfstep` calls by this name."""
    if name == "run":
        return active
    if name == "config":
        return early if active is None else active.config
    if name == "summary":
        return Entries() if active is None else active.summary
    if name == "watch" and active is None:
        return watching.watch
    return globals()[name]


def init(
    entity: str | None = None,
    project: str | None = None,
    dir: str | Path | None = None,  # noqa: A002 - W&B's name for it
    id: str | None = None,  # noqa: A002
    name: str | None = None,
    notes: str | None = None,
    tags: Sequence[str] | None = None,
    config: Any = None,
    config_exclude_keys: Sequence[str] | None = None,
    config_include_keys: Sequence[str] | None = None,
    allow_val_change: bool | None = None,
    group: str | None = None,
    job_type: str | None = None,
    mode: str | None = None,
    force: bool | None = None,
    reinit: Any = None,
    resume: Any = None,
    **further: Any,
) -> Run:
    """Begin a run. One that is active is returned, or with `reinit` finished first."""
    global active
    if active is not None and not active._is_finished:
        if reinit in (None, False, "default", "return_previous"):
            return active
        if reinit == "create_new":
            say_once("init(reinit='create_new') is not served: the run before it is finished")
        active.finish()
    ignored("init", further)
    settings = early.as_dict() | entries_of(config)
    early.clear()
    if config_include_keys:
        settings = {k: v for k, v in settings.items() if k in config_include_keys}
    settings = {k: v for k, v in settings.items() if k not in (config_exclude_keys or ())}
    own = {"notes": notes, "group": group, "job_type": job_type}
    settings |= {key: text for key, text in own.items() if text and key not in settings}
    tags = (tags,) if isinstance(tags, str) else tags or _listed("WANDB_TAGS")
    watch = watching.watch(
        name=name or os.environ.get("WANDB_NAME") or id,
        project=project or os.environ.get("WANDB_PROJECT"),
        config=settings,
        tags=tuple(tags),
        run=id or os.environ.get("WANDB_RUN_ID"),
        folder=Path(dir or os.environ.get("WANDB_DIR") or ".") / "halfstep",
        mode=_mode(mode),
    )
    described = read_run(watch.files.folder) if watch.files else {}
    active = Run(watch, described, {"name": name, "entity": entity, **own})
    vars(active.config)["_entries"].update(settings)
    return active


def log(
    data: Mapping[str, Any],
    step: int | None = None,
    commit: bool | None = None,
    sync: bool | None = None,
) -> None:
    """Tell something of the active run."""
    if active is None:
        say_once("log() before init() is passed over")
        return
    active.log(data, step=step, commit=commit, sync=sync)


def watch(models: Any, *arguments: Any, **named: Any) -> Any:
    """Name parameters as these modules do, of the active run."""
    return active.watch(models, *arguments, **named) if active is not None else None


def define_metric(name: str = "*", *arguments: Any, **named: Any) -> None:
    """Say which value of a metric stands in the active run's summary."""
    _of_active("define_metric", name, *arguments, **named)


def alert(title: str, *arguments: Any, **named: Any) -> None:
    """Say something on stderr, and keep it with the active run."""
    _of_active("alert", title, *arguments, **named)


def save(glob_str: Any = None, *arguments: Any, **named: Any) -> Any:
    """Send files along with the active run."""
    return _of_active("save", glob_str, *arguments, **named)


def finish(exit_code: int | None = None, quiet: bool | None = None) -> None:
    """End the active run, if there is one."""
    if active is not None:
        active.finish(exit_code, quiet)


def _of_active(method: str, *arguments: Any, **named: Any) -> Any:
    if active is None:
        say_once(f"{method}() before init() is passed over")
        return None
    return getattr(active, method)(*arguments, **named)


def _mode(mode: str | None) -> Any:
    wanted = mode or os.environ.get("WANDB_MODE") or "online"
    if wanted not in MODES:
        say_once(f"init(mode={wanted!r}) is not served; allowed: {', '.join(MODES)}")
    return MODES.get(wanted, "auto")


def _listed(variable: str) -> list[str]:
    return [text.strip() for text in os.environ.get(variable, "").split(",") if text.strip()]


def _kind(summary: str, goal: str | None) -> str:
    if summary == "best":
        return "max" if goal and goal.startswith("max") else "min"
    return summary


def _flat(data: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return what is nested as W&B names it: "val.accuracy"."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{path}.{name}" if path else str(name)
        found |= _flat(value, key) if isinstance(value, Mapping) else {key: value}
    return found


def _show(shown: dict[str, Any], name: str, value: Any) -> None:
    """Add a value as `Watch.log` takes it; of a list of images each by its number."""
    if isinstance(value, Image | Table | Histogram):
        try:
            shown[name] = value.shown()
        except Exception as error:
            say_once(f"{name} is not logged: {type(error).__name__}: {error}")
            return
        if isinstance(value, Image) and value.caption:
            shown[f"{name}.caption"] = value.caption
    elif isinstance(value, list | tuple) and any(isinstance(each, Image) for each in value):
        for number, each in enumerate(value):
            _show(shown, f"{name}-{number}", each)
    elif isinstance(value, Unserved):
        return
    elif hasattr(value, "savefig"):
        _show(shown, name, Image(value))
    elif getattr(value, "ndim", 0) or (isinstance(value, list | tuple) and _are_numbers(value)):
        shown[name] = Histogram(value).shown()  # as W&B does with an array
    else:
        shown[name] = value


def _are_numbers(values: Sequence[Any]) -> bool:
    return bool(values) and all(is_number(each) for each in values)


def _worded(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{kind} {each}" for kind, each in value.items() if kind != "count")
    return value.item() if hasattr(value, "item") else value
