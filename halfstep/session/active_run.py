"""The run that this process writes, and its parent's."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.session.watch_session import Watch

active: "Watch | None" = None
parents: "Watch | None" = None  # the run of the process that forked or spawned this one
