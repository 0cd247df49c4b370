# ruff: noqa: PTH109, PTH115, PTH123, PTH208
"""A recipe that prints its process, to compare a forked with a fresh one."""

import json
import os
import resource
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, ClassVar

import torch

from trainer.recipes.digits import Digits

#: Lines of /proc/self/status that describe isolation and signal handling.
STATUS = ("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp:", "CapInh", "CapPrm", "CapEff")
STATUS += ("CapBnd", "CapAmb", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed:")
#: Set by an interpreter or by torch as they start (as is the folder tmp/cache), or the parent's.
UNLIKE = ("LC_CTYPE", "TORCHINDUCTOR_CACHE_DIR", "HALFSTEP_PARENT_PID")


def outcome(path: str) -> str:
    """Return the results of reading and of writing a path."""
    said = []
    for mode in ("rb", "r+b"):
        try:
            with open(path, mode):
                said.append("done")
        except OSError as error:
            said.append(type(error).__name__)
    return " ".join(said)


def description() -> dict[str, Any]:
    """Return a description of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1]]
    return {
        "argv": sys.argv[1:],
        "path": sys.path,
        "modules of the service": sorted(
            name for name in sys.modules if name.split(".")[0] in ("app", "db", "worker", "tests")
        ),
        "environment": {k: v for k, v in os.environ.items() if k not in UNLIKE},
        "folder": os.getcwd(),
        "temporary": tempfile.gettempdir(),
        "hidden": sorted({*os.listdir("/tmp")} - {"cache"}) if os.getuid() else [],
        "status": [line for line in status if line.startswith(STATUS)],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "tried": {path: outcome(path) for path in os.environ["HALFSTEP_TEST_TRIED"].split(":")},
        "own": outcome("/proc/self/environ"),
        "sockets": sum(file.startswith("socket") for file in files),  # CUDA opens one
        "files": [file for file in files if file.startswith("/") and "/fd" not in file],
        "threads": [torch.get_num_threads(), threading.active_count()],
        "cuda": torch.cuda.is_initialized(),
        "handlers": [str(signal.getsignal(each)) for each in (signal.SIGUSR2, signal.SIGPIPE)],
        "main": sys.modules["__main__"].__spec__.name,
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "niceness": os.nice(0),
    }


class Described(Digits):
    """The recipe Digits, with a line about its process."""

    name: ClassVar = "described"
    title: ClassVar = "Described digits"

    def __init__(self, config: Any, device: torch.device) -> None:
        super().__init__(config, device)
        for name, value in description().items():
            print(f"DESCRIBED {json.dumps([name, value])}", flush=True)
