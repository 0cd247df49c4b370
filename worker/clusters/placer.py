"""The placer: asks a cluster for workers for each run that is queued, and says how they fare.

    halfstep placer          (with HALFSTEP_PLACEMENT; on a machine that may submit jobs)

It owns nothing that trains. While it is away what runs goes on, and what waits stays where it is.
"""

import os
import signal
import socket
import sys
import threading
from typing import Any

from db.database import Database, is_outage, open_database
from db.errors import HalfstepError
from db.queue import placements, workers
from db.settings import Settings
from halfstep.cli.application import ServingCommand, single
from halfstep.cli.output import say
from halfstep.process import close_to_others
from worker.attempts.recorder import may_pass
from worker.capabilities import Capabilities
from worker.clusters.placement import Pilots, PlacementRejected, open_placement
from worker.expired_leases import LostRuns

LOOK_SECONDS = 2.0


class Placer:
    """One cluster's part in the queue."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings = settings
        self.database = database
        self.engine = open_placement(settings)
        self.capabilities = Capabilities(settings)
        self.lost = LostRuns(database, settings.lease_seconds, _say)
        self.stopping = threading.Event()

    def run(self) -> None:
        """Look and place until told to stop; jobs go on without us."""
        self._register()
        is_away = False
        while not self.stopping.wait(LOOK_SECONDS):
            try:
                self.turn()
                is_away = False
            except Exception as error:
                if not (may_pass(error) or isinstance(error, OSError)):
                    raise
                if is_outage(error):
                    self.lost.note_outage()
                if not is_away:  # once an outage, of the database or of the cluster
                    _say(f"waiting: {error}")
                is_away = True
        self.capabilities.close()
        with self.database.writing() as session:
            workers.stop(session, self.id)

    def stop(self, *_signal: Any) -> None:
        """Stop soon."""
        self.stopping.set()

    def turn(self) -> None:
        """See how what was asked for fares, and ask for what else is queued.

        A pilot that is lost with its machine may have been the last worker that was up.
        """
        with self.database.touching() as session:
            pulse = workers.beat(session, self.id)
        self.lost.look(is_lost=pulse.is_lost)
        self._offer_anew()
        with self.database.reading() as session:
            unended = placements.unended(session)
        for placement, is_wanted in unended:
            self._look(
                Pilots(placement.run_id, placement.attempt, placement.nodes, placement.devices),
                is_wanted=is_wanted,
            )
        with self.database.reading() as session:
            rows = placements.wanted(
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
            _say(f"run {pilots.run_id}: {words}")
            self._note(pilots, "gone", words)
        else:
            _say(f"run {pilots.run_id}: {pilots.nodes} x {pilots.devices} asked for")

    def _look(self, pilots: Pilots, *, is_wanted: bool) -> None:
        """Note how pilots fare; those that nobody wants any more are cancelled.

        Those that never came to the cluster, for we died meanwhile, are gone, and asked for again.
        """
        if not is_wanted:
            self.engine.cancel(pilots)
        look = self.engine.look(pilots)
        self._note(pilots, look.state, look.reason)

    def _note(self, pilots: Pilots, state: str, reason: str) -> None:
        with self.database.writing() as session:
            placements.note(session, pilots.run_id, pilots.attempt, state, reason)

    def _register(self) -> None:
        """Offer what the cluster's nodes will, so that it can be chosen before any is up."""
        offer = self.capabilities.learn()
        offer["devices"] = [
            {**offer["devices"][0], "index": i} for i in range(self.settings.placed_devices)
        ]
        self.recipes = workers.recipe_names(offer["recipes"])
        with self.database.writing() as session:
            worker = workers.register(
                session,
                name=self.settings.worker_name or self.engine.name,
                host=socket.gethostname(),
                pid=os.getpid(),
                offers_commands=self.settings.allow_commands,
                placement=self.engine.name,
                **offer,
            )
            self.id = worker.id
        _say(f"runs are placed by {self.engine.name}")

    def _offer_anew(self) -> None:
        offer = self.capabilities.news()
        if offer is not None:
            with self.database.writing() as session:
                workers.offer(session, self.id, offer["recipes"])
            self.recipes = workers.recipe_names(offer["recipes"])


def _say(text: str) -> None:
    say(f"placer: {text}")


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
        placer = Placer(settings, database)
        signal.signal(signal.SIGTERM, placer.stop)
        signal.signal(signal.SIGINT, placer.stop)
        placer.run()
    except HalfstepError as error:
        sys.exit(f"placer: {error}")


if __name__ == "__main__":
    main()
