"""Warm process: has loaded torch and the built-in recipes, and forks trainings and probes.

    python -m trainer.warm_process                 (the worker calls this; its input is a socket)

The worker waits for its first probe: that is forked before the rest of a training is loaded.

It loads only code of this installation, and no recipe file of a user, runs no operation of torch
and does not initialise CUDA. A training process is forked before anything of its run is known:
`halfstep.fork_server`. There isolation and sandbox apply as in a process of its own, before code or
data of the run are loaded.
"""

import os
import socket
import sys
import threading
from importlib import import_module
from importlib.metadata import entry_points

import setproctitle  # noqa: F401 - by which the fork server names processes

from halfstep import fork_server
from halfstep.isolation import PARENT, Isolation
from halfstep.process import (
    close_to_others,
    end_with_parent,
    loading_modules,
    outlive_parent,
)

#: Programs, and what a training process imports by its first step.
PROBE, TRAINING = "trainer.probe", ("trainer.process", "trainer.job")
RECIPES = "trainer.recipes."


def main() -> None:
    """Load modules, serve, and in a forked process train or probe."""
    close_to_others()
    end_with_parent()  # until it may have forked trainings, which outlive a worker
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with loading_modules():
        load_probe()
    check()
    outlive_parent()  # a training may be among the first requests
    begun = fork_server.serve(control, is_tied=True, load=_load_rest)
    # From here on this is the process of a training, or of a probe.
    os.environ[PARENT] = str(begun.server)
    Isolation.from_environment(os.environ).apply()
    program = import_module(sys.argv[0])
    sys.modules["__main__"] = program  # what programs started by multiprocessing import
    program.main()


def _load_rest() -> None:
    with loading_modules():
        load_training()
    check()


def load_training() -> None:
    """Import what trainings need."""
    for module in TRAINING:
        import_module(module)


def load_probe() -> None:
    """Import the probe, and the built-in recipes that need torch only."""
    import_module(PROBE)
    for point in entry_points(group="halfstep.recipes"):
        if point.value.startswith(RECIPES) and not point.extras:
            import_module(point.module)


def check() -> None:
    """Exit if this process cannot be forked."""
    if problem := obstacle():
        sys.exit(problem)


def obstacle() -> str:
    """Return why this process cannot be forked, or ""."""
    import torch

    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    if threads > 1 or threading.active_count() > 1:
        return f"{threads} threads run after the imports; allowed: 1"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialised after the imports"
    return ""


if __name__ == "__main__":
    main()
