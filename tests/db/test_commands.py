"""Queued commands."""

import pytest

from db.database import Database
from db.errors import Conflict, Invalid
from db.queue import pending_reasons, queue, run_control
from db.queue.pending_reasons import Queue
from db.tables import Run, Status, User, Worker
from tests.db.conftest import CPU, DIGITS, add_worker, claim, submit, submit_command


def reason(database: Database, run: Run) -> str:
    with database.reading() as session:
        return pending_reasons.reason(run, Queue.read(session)).text


def test_only_a_worker_that_offers_commands_claims_them(
    database: Database, ada: User, worker: Worker
) -> None:
    """Workers without the permission skip commands; one with it claims both kinds in order."""
    with database.writing() as session:
        command, recipe = submit_command(session, ada), submit(session, ada)
        first = claim(session, worker)
        assert first is not None
        assert first.id == recipe.id
        assert claim(session, worker) is None
        found = claim(session, worker, commands=True)
        assert found is not None
        assert (found.id, found.attempt, found.status) == (command.id, 1, Status.STARTING)


def test_a_command_needs_its_number_of_devices(
    database: Database, ada: User, worker: Worker
) -> None:
    """A command claims its number of devices, without regard to precision and memory."""
    with database.writing() as session:
        submit_command(session, ada, devices_per_node=2, config={"training": 1})
        assert claim(session, worker, commands=True, free_devices=[0]) is None
        found = claim(session, worker, commands=True, precisions=[], free_devices=[0, 3])
        assert found is not None
        assert queue.node(session, found.id, 1).devices == [0, 3]


def test_a_queued_command_has_a_pending_reason(
    database: Database, ada: User, worker: Worker
) -> None:
    """A queued command's reason names the setting if no worker offers commands."""
    with database.writing() as session:
        command = submit_command(session, ada, devices_per_node=2)
    assert reason(database, command) == (
        "no worker that is up offers commands (HALFSTEP_ALLOW_COMMANDS=yes): "
        "start one that can take it, or cancel the run"
    )
    add_worker(database, "w2", [DIGITS], [CPU], offers_commands=True)
    lacking = "it needs 2 devices, and no worker has more than 1"
    assert reason(database, command).startswith(lacking)
    add_worker(database, "w2", [DIGITS], [CPU, CPU], offers_commands=True)
    assert reason(database, command) == "it is next: a worker is about to take it"


def test_a_command_is_held_in_the_queue_and_not_paused(
    database: Database, ada: User, worker: Worker
) -> None:
    """A queued command can be held; a running one can be cancelled or killed, but not paused."""
    with database.writing() as session:
        waits, works = submit_command(session, ada), submit_command(session, ada)
        assert run_control.pause(session, waits.id, ada).status == Status.PAUSED
        assert claim(session, worker, commands=True) is not None
        for ask in (run_control.pause, run_control.request_checkpoint):
            with pytest.raises(
                Conflict, match="is a command, whose loop Halfstep does not control"
            ):
                ask(session, works.id, ada)
        assert run_control.cancel(session, works.id, ada).status == Status.STOPPING
        assert run_control.kill(session, works.id, ada).desired_state == "kill"


def test_a_command_that_waits_for_no_run_is_rejected(database: Database, ada: User) -> None:
    """A command that waits for an unknown run is rejected, as any run is."""
    with database.writing() as session, pytest.raises(Invalid, match="there is no run 7"):
        submit_command(session, ada, after_id=7)
