"""`import halfstep as trackio`: Trackio's calls, where they differ from W&B's.

The other names are those of halfstep.wandb_compat, whose API Trackio has. `halfstep.__getattr__`
serves SERVED to code that has imported the package under the name `trackio`.
"""

from functools import partial
from typing import Any

from halfstep.telemetry.run_folder import read_run, runs_called, runs_folder
from halfstep.wandb_compat import calls, media, unsupported
from halfstep.wandb_compat.run import Run
from halfstep.wandb_compat.unsupported import Unserved, report_exceptions, report_ignored, say_once

#: Names of Trackio that do nothing here.
UNSERVED = (
    *("ArtifactTTL", "Config", "EvalTable", "ReferenceHandler", "Registry", "Trace"),
    *("delete_project", "freeze", "import_csv", "import_tf_events", "push", "sync"),
    *("register_reference_handler", "TRACKIO_DIR", "TRACKIO_LOGO_DIR"),
)


def init(
    project: str | None = None,
    name: str | None = None,
    group: str | None = None,
    space_id: str | None = None,
    server_url: str | None = None,
    dataset_id: str | None = None,
    bucket_id: str | None = None,
    config: Any = None,
    resume: str = "never",
    settings: Any = None,
    webhook_url: str | None = None,
    **further: Any,
) -> Run:
    """Start a run; an active one ends first.

    resume: "must" or "allow" continues the latest run of this name and project; "must" raises
    ValueError without it. GPUs, processors and memory are sampled as `watch` does.
    """
    sources = {"space_id": space_id, "server_url": server_url, "dataset_id": dataset_id}
    report_ignored("init", sources | {"bucket_id": bucket_id, "webhook_url": webhook_url})
    before = None
    if resume in ("must", "allow") and name is not None:
        before = _latest(name, project)
    if resume == "must" and before is None:
        raise ValueError(f"Run {name!r} does not exist in project {project!r}")
    named = {"id": before} if before else {"name": name}
    is_resumed = "allow" if before else None
    return calls.init(
        project=project, group=group, config=config, resume=is_resumed, reinit=True, **named
    )


def log(metrics: Any, step: int | None = None) -> None:
    """Log values to the active run."""
    calls.log(metrics, step=step)


def log_system(metrics: Any) -> None:
    """Log values of the machine at the current step of the active run."""
    run = calls.get_attribute("run")
    if run is None:
        say_once("log_system() without init() is ignored")
        return
    run.log_aside({f"system/{name}": value for name, value in dict(metrics).items()})


def log_artifact(artifact_or_path: Any, *arguments: Any, **named: Any) -> Any:
    """Log an artifact, or a file or folder as one, with the active run."""
    named.pop("overwrite", None)  # content that the artifact has makes no new version
    return calls.RUN_FUNCTIONS["log_artifact"](artifact_or_path, *arguments, **named)


def alert(
    title: str, text: str | None = None, level: Any = None, webhook_url: str | None = None
) -> None:
    """Alert the owner of the active run."""
    report_ignored("alert", {"webhook_url": webhook_url})
    calls.RUN_FUNCTIONS["alert"](title, text or "", level)


def save(glob_str: Any, project: str | None = None) -> Any:
    """Upload files with the active run."""
    return calls.RUN_FUNCTIONS["save"](glob_str)


def show(project: str | None = None, **further: Any) -> tuple[None, str, None, str]:
    """Print how the runs are opened; return the URL of the latest run's page, in its places."""
    say_once("show() opens nothing: `halfstep show` opens the runs of a folder")
    page = calls.latest_page() or ""
    return None, page, None, page


def _sample(name: str, *_: Any, **__: Any) -> dict[str, float]:
    say_once(f"{name}() does nothing: the machine is sampled every two seconds")
    return {}


def _latest(name: str, project: str | None) -> str | None:
    """Return the folder's name of the latest run of a name and project, or None."""
    found = None
    for place in runs_called(runs_folder(), name):
        if read_run(place).project == (project or None):
            found = place.name
    return found


class Image(media.Image):
    """An image: of Pillow, an array, or a file."""

    def __init__(self, value: Any, caption: str | None = None) -> None:
        super().__init__(value, caption=caption)


class Audio(media.Audio):
    """Audio clip: an array of (samples,) or (samples, 2), or a WAV file."""

    def __init__(
        self,
        value: Any,
        caption: str | None = None,
        sample_rate: int | None = None,
        format: str | None = None,  # noqa: A002 - Trackio's name for it
    ) -> None:
        super().__init__(value, sample_rate, caption)


SERVED: dict[str, Any] = {
    "AlertLevel": calls.AlertLevel,
    "Audio": Audio,
    "Histogram": media.Histogram,
    "Image": Image,
    "Markdown": str,
    "alert": alert,
    "init": init,
    "log": log,
    "log_artifact": log_artifact,
    "log_cpu": partial(_sample, "log_cpu"),
    "log_gpu": partial(_sample, "log_gpu"),
    "log_system": report_exceptions(log_system),
    "save": save,
    "show": show,
    **{name: Unserved(name) for name in UNSERVED},
}
unsupported.imported_as = "trackio"
