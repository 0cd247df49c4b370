"""Hydra: `hydra.callbacks.halfstep._target_: halfstep.hydra.Watch` in the configuration.

Steps are observed through torch's own scaler and optimizers, as in any script. This callback begins
a run for each job, with the job's configuration and overrides, and finishes it.
"""

from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from halfstep.session import run_start, watch_session
from halfstep.telemetry.run_folder import runs_folder


class Watch(Callback):  # type: ignore[misc]
    """Callback that watches each job. Takes the arguments of halfstep.watch.

    Calls of halfstep.watch in the job add their modules to its run. Runs are in the folder in which
    the program was started, whatever the job's working folder is.
    """

    def __init__(self, **named: Any) -> None:
        self._named = named
        self.watch: watch_session.Watch | None = None

    def on_job_start(self, config: DictConfig, **rest: Any) -> None:
        """Start watching; the tag of all jobs of a multirun is its folder."""
        hydra = config.hydra
        own = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
        is_multirun = hydra.mode is not None and hydra.mode.name == "MULTIRUN"
        overrides = list(hydra.overrides.task)
        described: dict[str, Any] = {
            "name": ",".join(overrides)[:100] or hydra.job.name,
            "tags": [hydra.sweep.dir] if is_multirun else [],
            "folder": runs_folder(Path(hydra.runtime.cwd)),
            "config": own,
        }
        self.watch = run_start.watch(**described | self._named)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **rest: Any) -> None:
        """Finish the run, with the job's exception if it raised one."""
        if self.watch is None:
            return
        error = job_return._return_value
        if isinstance(error, Exception):
            self.watch.__exit__(type(error), error, error.__traceback__)
        else:
            self.watch.finish()
