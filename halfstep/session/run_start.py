"""Public function watch(), which records a training loop.

Two lines in a script, whatever framework it uses:

    import halfstep
    halfstep.watch(model)

This records every step's loss, loss scale, skips with their culprits and gradient norms in a
folder on the local disk (see run_folder.py), and uploads it if a server is configured (see
uploader.py). It never changes the training by a bit, makes the host wait for the device, or ends
the script: an internal error is one line on stderr.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.session import active_run, arguments, process_sidecar, ranks, sweep_point
from halfstep.session.nesting import merge
from halfstep.session.notebook import is_notebook
from halfstep.session.queued_run import RUN, QueuedRun, find_queued_files, project_of
from halfstep.session.run_upload import server_of
from halfstep.session.stderr import say
from halfstep.session.sweep_point import SweepPoint
from halfstep.session.watch_session import Watch
from halfstep.session.watched_run import WatchedRun
from halfstep.telemetry import refuge
from halfstep.telemetry.run_folder import RunIsWritten, open_run
from halfstep.telemetry.writer_lock import WriterLock

if TYPE_CHECKING:
    from torch import nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer


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
    git: bool = True,
    code: bool = False,
    histogram_every: int = 0,
    layers_every: int | None = None,
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
    git: record commit, branch, remote, patch and installed packages; HALFSTEP_GIT=no turns it off.
    code: save the script and the code in its folder as an artifact; HALFSTEP_CODE=no turns it off.
    In a command from a server's queue the run is the queued one; name, project, run, url and
    folder are ignored.

    histogram_every: steps between histograms of the gradients' exponents; layers_every: between
    gradient norms per layer, None for 100, and for twice as many from 10,000 steps on, from 20,000
    and so forth; headroom_every: between measurements of each module's largest values;
    norms_every: between norms of all gradients: a skip in between has no culprits.
    """
    active = active_run.active
    if active and not active.is_superseded(run, name):
        active.add(*modules)
        return active
    try:
        queued_as = find_queued_files()
        project = project_of(queued_as) if queued_as else arguments.label("project", project)
        chosen = arguments.mode(mode)
        if chosen == "disabled":
            return Watch(None, project=project, named=(url, token))
        is_offline = chosen == "offline"
        if number := ranks.rank():
            server = None if is_offline else server_of(url, token)
            secret = server.token if server else token
            place = arguments.folder(folder)
            process_sidecar.keep_rank(number, place, secret, console=console, system=system)
            if not queued_as:
                project = sweep_point.project() or project
            return Watch(
                None, server=server, is_offline=is_offline, project=project, runs_of_rank=place
            )
        process_sidecar.stop()
        keeps_code = arguments.switch("code", code)
        every = arguments.intervals(histogram_every, layers_every, headroom_every, norms_every)
        if queued := QueuedRun.take():
            started = WatchedRun(
                queued.files,
                optimizers=arguments.optimizers(optimizers),
                scaler=arguments.scaler(scaler),
                every=every,
                queued=queued,
            )
            active_run.active = watch = Watch(started)
            watch.add(*modules)
            if config is not None:
                watch.configure(config)
            if keeps_code:
                watch.save_code()
            say(f"watching; this is run {os.environ[RUN]} of the queue")
            return watch
        point = SweepPoint.take()
        if point:
            name, project, run = point.name, point.project or None, None
        captures, samples = process_sidecar.purposes(console=console, system=system)
        describes = arguments.switch("git", git)
        server = None if is_offline else server_of(url, token)

        def begin(runs: Path) -> WatchedRun:
            lock = WriterLock()
            files = open_run(
                runs,
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
            return WatchedRun(
                files,
                optimizers=arguments.optimizers(optimizers),
                scaler=arguments.scaler(scaler),
                every=every,
                server=server,
                lock=lock,
            )

        runs = arguments.folder(folder)
        try:
            started = begin(runs)
        except (FileExistsError, NotADirectoryError):
            raise  # the folder is a file
        except OSError as error:
            elsewhere = refuge.open_refuge(runs)
            say(f"{runs} cannot be written, and the run is in {elsewhere}: {error}")
            started = begin(elsewhere)
        active_run.active = watch = Watch(started, is_offline=is_offline)
    except RunIsWritten as error:
        say(f"not watching: {error}")
        return Watch(None, project=project, named=(url, token))
    except Exception as error:
        say(f"not watching; the script continues: {type(error).__name__}: {error}")
        return Watch(None, project=project, named=(url, token))
    guard = started.guard
    watch.sweep_settings = point.config if point else {}
    if ranks.world_size() > 1:
        guard.call(started.announce_ranks)
    watch.add(*modules)
    if is_notebook() and arguments.switch("console", console):
        guard.call(started.keep_cells)
    if captures or samples or describes:
        guard.call(
            started.start_sidecar,
            captures=captures,
            samples=samples,
            describes=describes,
            keeps_code=keeps_code,
        )
    if keeps_code:
        watch.save_code()
    guard.call(started.upload.start)
    return watch


def _with_point(config: Any, point: SweepPoint | None) -> object:
    """Return a run's configuration with the settings of a sweep's point, which win."""
    return merge(config or {}, point.config) if point else config
