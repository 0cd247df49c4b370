"""Exclusive user and cgroup of an attempt, from its preparation to its end."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from db.settings import Settings
from halfstep import untrusted_files
from halfstep.telemetry.attempt_files import AttemptFiles
from worker.attempts.attempt import CannotStart
from worker.sandbox import cgroup_limits
from worker.sandbox.cgroup_limits import RunGroup
from worker.sandbox.run_users import NoneFree, RunUser


class RunIsolation:
    """User and cgroup of an attempt, None where the settings have none for runs."""

    def __init__(self, settings: Settings, files: AttemptFiles, folder: Path, name: str) -> None:
        """folder: the run's own. name: that of the cgroup."""
        self._settings, self._files = settings, files
        self._folder, self._name = folder, name
        self.user: RunUser | None = None
        self.group: RunGroup | None = None

    def acquire(self) -> None:
        """Acquire both, unless an earlier call has. Raises CannotStart."""
        try:
            self.user = self.user or RunUser.acquire(self._settings)
            if self.user:
                self.user.take_over(self._files.folder, self._settings.run_user_range)
                self.user.let_read(self._folder)
            if cgroup_limits.list_limits(self._settings):
                self.group = RunGroup(self._settings, self._name)
        except (NoneFree, OSError) as error:
            raise CannotStart(f"it cannot be isolated: {error}") from error

    def release(self) -> None:
        """Kill what is left of the run, delete its temporary files and release both."""
        if self.user:
            self.user.clear()
        with suppress(OSError):
            untrusted_files.delete(self._files.folder, self._files.temporary.name)
        shutil.rmtree(self._folder / "staged", ignore_errors=True)
        if self.user:  # another run may have this user next: it gives back what it could read
            self._folder.chmod(0o700)
            os.chown(self._files.folder, 0, 0)
            self.user.release()
        if self.group:
            self.group.clear()
