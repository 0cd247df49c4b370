"""Continue a run that was ended: a fork at its last checkpoint with the same configuration."""

import re
from copy import deepcopy

from sqlalchemy.orm import Session

from app.submission.submission import Submission, most_priority, submit
from db.access import projects
from db.errors import Conflict
from db.files import checkpoints
from db.queue.idempotency import hash_of_request, made_by
from db.runs import runs
from db.tables import Run, Status, User
from halfstep.telemetry.plain_json import JsonObject

#: Statuses of runs that ended before their last step; a paused run is resumed instead.
CUT_SHORT = (Status.CANCELLED, Status.FAILED)


def continue_run(
    session: Session, user: User, run_id: int, *, idempotency_key: str | None = None
) -> Run:
    """Queue the remaining steps of an ended run as a new run from its last checkpoint.

    Raises Conflict if there is no checkpoint, or a continuation exists already.
    """
    request = {"continuation": run_id}
    before = made_by(session, Run, user, idempotency_key, hash_of_request(request))
    if before is not None:
        return before
    projects.lock_within(session, Run, run_id)
    run = runs.get(
        session, run_id, lock=True
    )  # a concurrent second request then finds the first's run
    runs.check_has_recipe(run, "be continued")
    if run.status not in CUT_SHORT:
        raise Conflict(
            f"Run {run_id} is {run.status}: only a cancelled or failed run can be continued."
        )
    step = checkpoints.newest_step(session, run_id, before=run.steps_total)
    if step is None:
        raise Conflict(f"Run {run_id} has no checkpoint before its last step to continue from.")
    _check_is_first(session, run, step)
    submission = Submission(
        recipe=run.recipe,
        config=_config(run),
        name=re.sub(r" from step \d+$", f" from step {step}", run.name),
        tags=run.tags,
        project=run.project,
        priority=most_priority(session, run.project, run.priority),
        preemptible=run.preemptible,
        nodes=run.nodes,
        devices_per_node=run.devices_per_node,
        parent_id=run.id,
        parent_step=step,
    )
    return submit(session, user, submission, idempotency_key=idempotency_key, request=request)


def _check_is_first(session: Session, run: Run, step: int) -> None:
    for fork in runs.open_forks(session, run.id, step, most=100):
        if _config(fork) == _config(run):
            raise Conflict(
                f"Run {run.id} is already continued by run {fork.id}, which is {fork.status}."
            )


def _config(run: Run) -> JsonObject:
    config = deepcopy(run.config)
    config.pop("weights", None)  # a checkpoint has its own
    return config
