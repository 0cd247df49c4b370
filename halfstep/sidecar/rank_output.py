"""Output and memory of further ranks, on their way to the first rank's sidecar."""

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from halfstep.session.ranks import RANKS, read_announced
from halfstep.sidecar.system import tree_memory
from halfstep.telemetry.events import Event, Line, Sample
from halfstep.telemetry.folder_lock import FolderLock
from halfstep.telemetry.patient_spool import PatientSpool
from halfstep.telemetry.spool import Position, SpoolReader

MOST_WAITING = 5000  # events of a rank until the first rank has begun the run
DRAIN_SECONDS, POLL_SECONDS = 5.0, 0.05  # for the last output of other ranks


class RankSpool:
    """Spool of a further rank in the run's folder, once the first rank has begun the run."""

    def __init__(self, meeting: Path, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self._waiting: deque[Event] = deque(maxlen=MOST_WAITING)
        self._spool: PatientSpool | None = None
        self._lock: FolderLock | None = None

    def event(self, event: Event) -> None:
        """Append an event."""
        self._waiting.append(event)
        self._write()

    def _write(self) -> None:
        if self._spool is None and (files := read_announced(self._meeting)):
            folder = files.folder / RANKS / str(self._rank)
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(folder / "lock")
            self._lock.acquire()
            self._spool = PatientSpool(folder, files.attempt, lambda _: None)
        while self._spool and self._waiting:
            self._spool.event(self._waiting.popleft())

    def close(self) -> None:
        """Write the rest, and close the spool; what has waited in vain is lost."""
        self._write()
        if self._spool:
            self._spool.close()
        if self._lock:
            self._lock.release()


class RankMonitor:
    """Sampler of a further rank: the memory of its processes. Device -2 is rank 1, and so on."""

    def __init__(self, rank: int, pid: int) -> None:
        self._device, self._pid = -1 - rank, pid

    def take(self, elapsed_ms: int) -> list[Sample]:
        """Return one sample."""
        return [
            Sample(
                elapsed_ms=elapsed_ms,
                device=self._device,
                utilization=None,
                memory_bytes=None,
                power_watts=None,
                temperature_celsius=None,
                process_memory_bytes=tree_memory(self._pid),
            )
        ]


class NoLog:
    """The log file of a further rank: the first rank's has its lines."""

    def append_log(self, text: str) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def complete_parts(self) -> list[Path]:
        """Return nothing."""
        return []


class RankReaders:
    """Readers of the spools of further ranks, in the first rank's sidecar."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._folder, self._attempt = folder / RANKS, attempt
        self._readers: dict[Path, SpoolReader] = {}

    def poll(self) -> Iterator[Event]:
        """Yield new events; lines begin with their rank."""
        for folder in self._folder.glob("[0-9]*"):
            if folder not in self._readers:
                self._readers[folder] = SpoolReader(folder, Position(self._attempt, 0, 0))
            for item in self._readers[folder].poll():
                if isinstance(item, Line) and isinstance(item.text, str):
                    yield replace(item, text=f"[rank {folder.name}] {item.text}")
                elif isinstance(item, Line | Sample):
                    yield item

    def drain(self) -> Iterator[Event]:
        """Yield the rest, once the other ranks have ended, or do not end in time."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._is_written() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        yield from self.poll()

    def _is_written(self) -> bool:
        return any(FolderLock(folder / "lock").is_held() for folder in self._folder.glob("[0-9]*"))
