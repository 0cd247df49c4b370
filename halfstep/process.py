"""Which process it is, over the life of the machine: numbers are given out again."""

from pathlib import Path


def started(pid: int) -> int | None:
    """Return when a process began, in the kernel's ticks since its own start; None: it is gone."""
    try:
        # Its name stands in brackets, and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # of 3 and 22, in proc(5)


def lives(pid: int, since: int | None) -> bool:
    """Tell whether this very process goes on; since: when it began, as `started` says."""
    return since is not None and started(pid) == since
