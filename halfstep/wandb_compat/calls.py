"""`wandb.init` and the module-level functions, which act on the active run."""

import os
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial, update_wrapper
from inspect import signature
from pathlib import Path
from typing import Any

from halfstep.session import logged_values, ranks, run_start, sweep_point, watch_session
from halfstep.session.queued_run import find_queued_files
from halfstep.telemetry.run_folder import read_description, read_run, run_called, runs_folder
from halfstep.wandb_compat import tensorboard
from halfstep.wandb_compat.artifacts import Artifact
from halfstep.wandb_compat.media import (
    Audio,
    Histogram,
    Html,
    Image,
    Object3D,
    Plotly,
    Table,
    Video,
)
from halfstep.wandb_compat.run import Run
from halfstep.wandb_compat.settings import Entries, check_change, entries_of
from halfstep.wandb_compat.sweeps import sweep
from halfstep.wandb_compat.unsupported import Error, report_ignored, say_once

MODES = {"online": "auto", "shared": "auto", "offline": "offline", "dryrun": "offline"}
MODES |= {"disabled": "disabled", "run": "auto"}


class AlertLevel(StrEnum):
    """Levels of alerts."""

    INFO, WARN, ERROR = "INFO", "WARN", "ERROR"


MEDIA = {
    "AlertLevel": AlertLevel,
    "Artifact": Artifact,
    "Audio": Audio,
    "Histogram": Histogram,
    "Html": Html,
    "Image": Image,
    "Object3D": Object3D,
    "Plotly": Plotly,
    "Table": Table,
    "Video": Video,
    "sweep": sweep,
}
#: Functions and classes of Halfstep under the same names.
OURS = {
    "Audio": logged_values.Audio,
    "Histogram": logged_values.Histogram,
    "Html": logged_values.Html,
    "Video": logged_values.Video,
    "watch": run_start.watch,
}

early = Entries()  # values set before `init`
_begun: Run | None = None  # the latest run


def _call_active(method: str, *arguments: Any, **named: Any) -> Any:
    if (run := _active()) is None:
        say_once(f"{method}() without init() is ignored")
        return None
    return getattr(run, method)(*arguments, **named)


def _forward(name: str) -> Callable[..., object]:
    """Return a function with the signature and documentation of a run's method, without self."""
    method = getattr(Run, name)
    function, own = partial(_call_active, name), signature(method)
    update_wrapper(function, method)
    without_self = list(own.parameters.values())[1:]
    function.__dict__["__signature__"] = own.replace(parameters=without_self)
    return function


#: Functions that call the active run's method of the same name.
RUN_FUNCTIONS = {
    name: _forward(name)
    for name in (
        *("alert", "define_metric", "log_artifact", "log_code", "log_model"),
        *("save", "use_artifact", "use_model", "watch"),
    )
}


def get_attribute(name: str) -> Any:
    """Return the attribute of the module `wandb` with this name."""
    run = _active()
    if name == "run":
        return run
    if name == "config":
        return early if run is None else run.config
    if name == "summary":
        return Entries() if run is None else run.summary
    if run is None and name in OURS:
        return OURS[name]
    return MEDIA.get(name) or RUN_FUNCTIONS.get(name) or globals()[name]


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
    save_code: bool | None = None,
    sync_tensorboard: bool | None = None,
    **further: Any,
) -> Run:
    """Start a run. An active run is returned; with `reinit` or in a later cell it ends first."""
    global _begun
    if (before := _active()) is not None:
        is_kept = reinit in (None, False, "default", "return_previous")
        if is_kept and not before._watch.is_superseded(id, name):
            say_once("init() returns the run that is active: finish() it, or pass reinit=True")
            return before
        if reinit == "create_new":
            say_once("init(reinit='create_new') is not supported: the active run is finished first")
        before.finish()
    report_ignored("init", further)
    if resume is None:
        resume = os.environ.get("WANDB_RESUME")
    labels = {"name": name, "entity": entity, "notes": notes, "group": group, "job_type": job_type}
    try:
        settings = early.as_dict() | entries_of(config)
        early.clear()
        if config_include_keys:
            settings = {k: v for k, v in settings.items() if k in config_include_keys}
        settings = {k: v for k, v in settings.items() if k not in (config_exclude_keys or ())}
        folder = runs_folder(Path(dir or os.environ.get("WANDB_DIR") or "."))
        identifier = id or os.environ.get("WANDB_RUN_ID")
        if _mode(mode) != "disabled":
            _check_resume(folder, identifier, resume, settings, allow_val_change)
        own = {key: labels[key] for key in ("group", "job_type") if labels[key]}
        settings = own | settings
        watch = run_start.watch(
            name=name or os.environ.get("WANDB_NAME") or id,
            project=project or os.environ.get("WANDB_PROJECT"),
            config=settings,
            tags=(tags,) if isinstance(tags, str) else tuple(tags or _list_values("WANDB_TAGS")),
            run=identifier,
            folder=folder,
            mode=_mode(mode),
            git=not _is_set("WANDB_DISABLE_GIT"),
            code=_is_set("WANDB_SAVE_CODE") if save_code is None else bool(save_code),
        )
        described = read_description(watch.files.folder) if watch.files else None
        _begun = Run(watch, described, labels, allow_val_change)
        if notes:
            watch.describe(note=notes)
        if sync_tensorboard:
            tensorboard.record(_begun)
        entries = ((described and described.config) or {}) | settings
        vars(_begun.config)["_entries"].update(entries | watch.sweep_settings)
    except Error:
        raise
    except Exception as error:
        say_once(f"init() failed, and nothing is recorded: {type(error).__name__}: {error}")
        _begun = Run(watch_session.Watch(None), None, labels)
    return _begun


def log(
    data: Mapping[str, Any],
    step: int | None = None,
    commit: bool | None = None,
    sync: bool | None = None,
) -> None:
    """Log values to the active run, or else to what `watch` watches."""
    if _active() is None and (watch := watch_session.current()) is not None:
        watch.log(data, step=step)
        return
    _call_active("log", data, step=step, commit=commit, sync=sync)


def finish(exit_code: int | None = None, quiet: bool | None = None) -> None:
    """End the active run, if there is one."""
    if (run := _active()) is not None:
        run.finish(exit_code, quiet)


def latest_page() -> str | None:
    """Return the URL of the latest run's page, also after its end."""
    return _begun.url if _begun else None


def _active() -> Run | None:
    return None if _begun is None or _begun.is_finished else _begun


def _check_resume(
    folder: Path,
    identifier: str | None,
    resume: Any,
    settings: Mapping[str, Any],
    allow_val_change: bool | None,
) -> None:
    """Raise Error if an existing run, or a missing one, is not as the script requires it.

    The runs of queues and sweeps are not chosen by the script, nor those of further ranks.
    """
    if ranks.rank() or find_queued_files() or sweep_point.is_waiting():
        return
    place = run_called(folder, identifier) if identifier else None
    what = f"init(id={identifier!r}, resume={resume!r})"
    if resume == "must" and place is None:
        raise Error(f"{what}: there is no such run in {folder}; allowed: one that is there")
    if resume == "never" and place is not None:
        raise Error(f"{what}: {place} exists; allowed: another id, or resume='allow'")
    if resume in (True, "auto") and identifier is None:
        say_once(f"init(resume={resume!r}) is not supported and is ignored; allowed: an id, too")
    if place is not None:
        if not resume:
            say_once(f"init(id={identifier!r}) continues the run in {place}")
        check_change(read_run(place).config or {}, settings, allow_val_change)


def _mode(mode: str | None) -> Any:
    chosen = mode or os.environ.get("WANDB_MODE") or "online"
    if chosen not in MODES:
        say_once(f"init(mode={chosen!r}) is not supported; allowed: {', '.join(MODES)}")
    return MODES.get(chosen, "auto")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("true", "1", "yes", "on")


def _list_values(variable: str) -> list[str]:
    return [text.strip() for text in os.environ.get(variable, "").split(",") if text.strip()]
