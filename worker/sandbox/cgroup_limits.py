"""Limits of a run by cgroup v2: memory, processes, processors.

The worker needs a cgroup that it can divide: its own as root of a machine or of a container that
permits it, or a delegated one (`Delegate=yes` of systemd). A divided cgroup has no processes of its
own, so the worker moves into a child, `daemons`.
"""

import os
from contextlib import suppress
from pathlib import Path

from db.settings import Settings

ROOT, DAEMONS = Path("/sys/fs/cgroup"), "daemons"
#: By setting.
CONTROLLERS = {"run_memory_gib": "memory", "run_processes": "pids", "run_cpus": "cpu"}
PERIOD_US = 100_000


def list_limits(settings: Settings) -> list[str]:
    """Return the settings that need a cgroup.

    A run's own user limits processes without one.
    """
    names = [name for name in CONTROLLERS if getattr(settings, name)]
    return [name for name in names if name != "run_processes" or not settings.run_users]


def obstacle(settings: Settings, root: Path = ROOT) -> str:
    """Prepare this cgroup for the limits; return why they are unavailable, or ""."""
    try:
        own = _find_own_cgroup(root)
        base = own.parent if own.name == DAEMONS else own
        there = set((base / "cgroup.controllers").read_text().split())
        missing = sorted({CONTROLLERS[name] for name in list_limits(settings)} - there)
        if missing:
            return f"the cgroup {base} has no controller {', '.join(missing)}"
        (base / DAEMONS).mkdir(exist_ok=True)
        for pid in (base / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (base / DAEMONS / "cgroup.procs").write_text(pid)
        controllers = " ".join(f"+{CONTROLLERS[name]}" for name in list_limits(settings))
        (base / "cgroup.subtree_control").write_text(controllers)
    except OSError as error:
        return f"cgroups are not writable: {error}"
    return ""


class RunGroup:
    """The cgroup of one attempt."""

    def __init__(self, settings: Settings, name: str, root: Path = ROOT) -> None:
        """Create it, with its limits. Raises OSError."""
        self.folder = _find_own_cgroup(root).parent / name
        self.folder.mkdir(exist_ok=True)
        if settings.run_memory_gib:
            self._set("memory.max", str(int(settings.run_memory_gib * 2**30)))
            with suppress(OSError):  # a kernel without swap accounting
                self._set("memory.swap.max", "0")
            self._set("memory.oom.group", "1")
        if settings.run_processes:
            self._set("pids.max", str(settings.run_processes))
        if settings.run_cpus:
            self._set("cpu.max", f"{int(settings.run_cpus * PERIOD_US)} {PERIOD_US}")

    def clear(self) -> None:
        """Kill its processes and remove it."""
        with suppress(OSError):  # a remaining cgroup does not matter to the ended run
            self._set("cgroup.kill", "1")
            self.folder.rmdir()

    def _set(self, name: str, value: str) -> None:
        (self.folder / name).write_text(value)


def _find_own_cgroup(root: Path) -> Path:
    """Return the folder of this process's cgroup. Raises OSError."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None or not (root / "cgroup.controllers").exists():
        raise FileNotFoundError(f"there is no cgroup v2 at {root}")
    return Path(os.path.normpath(f"{root}{path}"))
