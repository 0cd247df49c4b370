"""The web server: uvicorn, which closes live streams at a stop instead of waiting for them."""

import ctypes
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Event

import uvicorn

from app.alerts.alert_delivery import AlertDelivery
from app.artifacts import artifact_uploads
from app.files import weight_uploads
from app.files.damage_check_job import DamageCheckJob
from app.files.step_conversion_job import StepConversionJob
from app.http.connections import TimeoutProtocol
from app.main import create_app
from app.periodic_tasks import repeating
from app.sweeps import sweep_submission
from app.trash import retention_job
from app.trash.purge import Purge
from db.alerts import alert_evaluation
from db.database import Database
from db.errors import Conflict
from db.files import scheduled_backups
from db.queue import preemption
from db.settings import Settings

#: Seconds for responses in progress, such as downloads, to finish at a stop.
GRACE_SECONDS = 3
M_ARENA_MAX, ARENAS = -8, 2  # of glibc's mallopt


class Server(uvicorn.Server):
    """Serves until a stop signal."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.app = create_app(settings, database)
        self._stopping = Event()
        self._database = database
        self._conflict: Conflict | None = None
        seen = alert_evaluation.Seen(folder=settings.data)
        alert = partial(alert_evaluation.evaluate, database, seen, settings.address)
        #: Background tasks and their intervals in seconds.
        self._works: dict[str, tuple[Callable[[], object], float]] = {
            "sweep_submission": (
                partial(sweep_submission.submit_due, database, settings.queued_per_user),
                1.0,
            ),
            "preemption": (partial(preemption.preempt_due, database, **settings.per_user), 1.0),
            "alert_evaluation": (alert, 2.0),
            "alert_delivery": (AlertDelivery(settings, database, self._stopping).deliver_due, 2.0),
            "upload_cleanup": (partial(weight_uploads.tidy, settings, database), 3600.0),
            "blob_collection": (partial(artifact_uploads.tidy, settings, database), 3600.0),
            "retention": (
                partial(retention_job.prune_due, settings, database, self._stopping),
                3600.0,
            ),
            "backup": (partial(scheduled_backups.back_up_if_due, settings, database), 60.0),
            "step_conversion": (StepConversionJob(database, self._stopping).convert_due, 5.0),
            "damage_check": (
                DamageCheckJob(settings, database, self._stopping).check_due,
                5.0,
            ),
            "database_revision": (self._check_revision, 5.0),
            "purge": (Purge(settings, database, self._stopping).erase_due, 5.0),
        }
        config = uvicorn.Config(
            self.app,
            log_config=None,  # see halfstep.cli.logs
            access_log=False,  # addresses may hold a sign-in token
            http=TimeoutProtocol,
            # Trust no other proxy, loopback included, which uvicorn trusts by default.
            proxy_headers=bool(settings.proxies),
            forwarded_allow_ips=settings.proxies,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, with the background tasks. Raises Conflict if the database is migrated."""
        _limit_arenas()
        with repeating(self._works, self._stopping):
            super().run(sockets)
        if self._conflict is not None:
            raise self._conflict

    def _check_revision(self) -> None:
        """Stop serving if another version has migrated the database: requests would fail."""
        try:
            self._database.require_current()
        except Conflict as error:
            self._conflict, self.should_exit = error, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the live streams first: uvicorn would wait for them until its time is up."""
        self.app.state.live.close()
        await super().shutdown(sockets)


def _limit_arenas() -> None:
    """Let the threads share two heaps of glibc: one each would keep what large responses took."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)
