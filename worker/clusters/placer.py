"""The placer: requests workers from a cluster for queued runs, and tracks their state.

    halfstep placer          (with HALFSTEP_PLACEMENT; on a machine that may submit jobs)

It owns no training: while it is down, running jobs continue, and queued runs wait.
"""

import logging
import os
import signal
import socket
import sys
import threading
from typing import Any

from msgspec.structs import replace

from db.database import Database, is_outage, open_database
from db.errors import HalfstepError
from db.queue import placements, workers
from db.settings import Settings
from halfstep.cli import logs
from halfstep.cli.application import ServingCommand, single
from halfstep.machine_offer import rows
from halfstep.process import close_to_others
from worker.attempts.recorder import may_pass
from worker.capabilities import Capabilities
from worker.clusters.placement import Pilots, PlacementRejected, open_placement
from worker.expired_leases import ExpiredLeases

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0


class Placer:
    """Tracks and places the queued runs of one cluster."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings = settings
        self.database = database
        self.engine = open_placement(settings)
        self.capabilities = Capabilities(settings)
        self.lost = ExpiredLeases(database, settings.lease_seconds)
        self.stopping = threading.Event()

    def run(self) -> None:
        """Poll and place until stopped; jobs continue without the placer."""
        self._register()
        is_away = False
        while not self.stopping.wait(POLL_SECONDS):
            try:
                self.turn()
                is_away = False
            except Exception as error:
                if not (may_pass(error) or isinstance(error, OSError)):
                    raise
                if is_outage(error):
                    self.lost.note_outage()
                if not is_away:  # once per outage of the database or the cluster
                    logger.warning("waiting: %s", error)
                is_away = True
        self.capabilities.close()
        with self.database.writing() as session:
            workers.stop(session, self.id)

    def stop(self, *_signal: Any) -> None:
        """Stop the loop soon."""
        self.stopping.set()

    def turn(self) -> None:
        """Update the state of placed pilots, and place further queued runs.

        Also requeues lost runs: a pilot lost with its machine may have been the only worker.
        """
        with self.database.single_write() as session:
            pending = workers.heartbeat(session, self.id)
        self.lost.check(is_lost=pending.is_lost)
        self._update_recipes()
        with self.database.reading() as session:
            unended = placements.list_open(session)
        for placement, is_wanted in unended:
            self._poll(
                Pilots(placement.run_id, placement.attempt, placement.nodes, placement.devices),
                is_wanted=is_wanted,
            )
        with self.database.reading() as session:
            rows = placements.list_unplaced(
                session,
                self.recipes,
                **self.settings.per_user,
                limit=self.settings.max_pending_pilots,
            )
        for row in rows:
            with self.database.writing() as session:
                is_ours = placements.begin(session, row)
            if is_ours:
                self._place(Pilots(row.id, row.attempt, row.nodes, row.devices_per_node))

    def _place(self, pilots: Pilots) -> None:
        try:
            self.engine.place(pilots)
        except PlacementRejected as error:
            words = " ".join(str(error).split())
            logger.warning("%s", words, extra={"run": pilots.run_id})
            self._note(pilots, "gone", words)
        else:
            words = "%d x %d devices requested"
            logger.info(words, pilots.nodes, pilots.devices, extra={"run": pilots.run_id})

    def _poll(self, pilots: Pilots, *, is_wanted: bool) -> None:
        """Record the state of pilots; cancel those that are no longer needed.

        Pilots that were never submitted, because the placer died in between, are gone, and placed
        again.
        """
        if not is_wanted:
            self.engine.cancel(pilots)
        status = self.engine.poll(pilots)
        self._note(pilots, status.state, status.reason)

    def _note(self, pilots: Pilots, state: str, reason: str) -> None:
        with self.database.writing() as session:
            placements.note(session, pilots.run_id, pilots.attempt, state, reason)

    def _register(self) -> None:
        """Register the capabilities of the cluster's nodes before any worker is up."""
        offer = self.capabilities.learn()
        first, recipes = offer.devices[0], rows(offer.recipes)
        devices = [replace(first, index=i) for i in range(self.settings.placed_devices)]
        self.recipes = workers.recipe_names(recipes)
        with self.database.writing() as session:
            worker = workers.register(
                session,
                name=self.settings.worker_name or self.engine.name,
                host=socket.gethostname(),
                pid=os.getpid(),
                offers_commands=self.settings.allow_commands,
                placement=self.engine.name,
                devices=rows(devices),
                recipes=recipes,
                versions=offer.versions,
            )
            self.id = worker.id
        logger.info("runs are placed by %s", self.engine.name)

    def _update_recipes(self) -> None:
        offer = self.capabilities.poll_changes()
        if offer is not None:
            with self.database.writing() as session:
                workers.offer(session, self.id, rows(offer.recipes))
            self.recipes = workers.recipe_names(rows(offer.recipes))


@single(ServingCommand)
def main() -> None:
    """Request workers from a cluster, run by run.

    The cluster is the one that HALFSTEP_PLACEMENT names. SIGTERM or Ctrl-C ends it.
    """
    close_to_others()
    try:
        settings = Settings.read()
        database = open_database(settings)
        database.migrate()
        logs.configure("placer", settings.log_level, settings.log_format)
        placer = Placer(settings, database)
        signal.signal(signal.SIGTERM, placer.stop)
        signal.signal(signal.SIGINT, placer.stop)
        placer.run()
    except HalfstepError as error:
        sys.exit(f"placer: {error}")


if __name__ == "__main__":
    main()
