"""Who may use which route: the one table of rights, which every signed-in request is held against.

A route that stands nowhere in it is refused to everybody, and a test walks all of them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from fastapi import Request
from sqlalchemy import select
from sqlalchemy.orm import Session

from db import rights
from db.errors import HalfstepError, NotFound
from db.rights import DEEDS, Right
from db.tables import LARGEST_ID, Run, Sweep, User


class Forbidden(HalfstepError):
    """Your role does not allow this."""


#: What is asked of nobody but to be signed in: it shows and changes one's own alone, or shows no
#: more than one's projects have, or asks for itself what a body names.
ANYBODY = "anybody"
#: For people at their browsers, and what is the whole instance's.
COMMAND, OPERATE = "command", "operate"

_TABLE: dict[str, str] = {
    ANYBODY: """
        pages.sign_in.sign_out
        pages.runs.list_runs pages.run_bin.show_bin pages.comparison.compare
        pages.comparison.show_group pages.sweeps.list_sweeps
        pages.new_run.new_run pages.new_run.other_recipe pages.new_run.submit_run
        pages.new_sweep.new_sweep pages.new_sweep.from_run pages.new_sweep.begin
        pages.actions.cancel_runs
        pages.workers.list_workers pages.recipes.list_recipes pages.recipes.show_recipe
        pages.alerts.show_alerts pages.alerts.make_rule pages.alerts.switch_rule
        pages.alerts.delete_rule pages.alerts.read_notices pages.alerts.lead_back
        pages.alerts.make_channel pages.alerts.switch_channel pages.alerts.delete_channel
        pages.alerts.test_channel
        pages.views.save_view pages.views.delete_view
        pages.account.show_account pages.account.set_password pages.account.make_token
        pages.account.revoke_token
        pages.documents.show_first pages.documents.show_document
        api.streams.watch_list api.vocabulary.get_vocabulary
        api.runs.list_runs api.runs.submit_run api.estimates.estimate api.bulk.act_on_runs
        api.run_bin.list_bin api.sweeps.list_sweeps api.sweeps.begin_sweep
        api.comparison.get_group api.comparison.get_comparison api.comparison.get_series_of_runs
        api.views.list_views api.views.save_view api.views.delete_view
        api.workers.list_workers api.workers.list_recipes api.storage.get_storage
        api.tokens.list_tokens api.tokens.make_token api.tokens.revoke_token
        api.alerts.list_rules api.alerts.make_rule api.alerts.switch_rule api.alerts.delete_rule
        api.alerts.list_notices api.alerts.news api.alerts.read_notices api.alerts.list_channels
        api.alerts.make_channel api.alerts.switch_channel api.alerts.delete_channel
        api.alerts.test_channel api.alerts.list_deliveries
        api.docs.openapi api.docs.docs api.unversioned.redirect
    """,
    Right.SEE: """
        pages.run.show_run pages.sweeps.show_sweep pages.alerts.make_rule_of_run
        api.runs.get_run api.runs.get_config api.streams.watch_run
        api.sweeps.get_sweep api.sweeps.list_trials api.sweeps.watch_sweep
        api.series.get_series api.series.get_flagged_steps api.series.get_events
        api.series.get_metrics api.series.get_log api.series.get_checkpoints
        api.system.get_system api.environment.get_environment
        api.diagnosis.get_findings api.diagnosis.get_histograms api.diagnosis.get_layer_norms
        api.diagnosis.get_headroom api.diagnosis.get_replays api.diagnosis.get_artifacts
        api.alerts.make_rule_of_run
    """,
    Right.DOWNLOAD: "downloads.download downloads.download_artifact api.export.export_rows",
    Right.SUBMIT: """
        pages.actions.go_on pages.comparison.queue_comparison
        api.runs.go_on api.comparison.compare
    """,
    Right.STEER: """
        pages.actions.set_scale pages.actions.replay pages.actions.steer
        pages.sweeps.extend pages.sweeps.steer
        api.runs.edit_run api.runs.cancel_run api.runs.kill_run api.runs.pause_run
        api.runs.resume_run api.runs.request_checkpoint api.runs.set_scale api.runs.replay_step
        api.sweeps.cancel_sweep api.sweeps.pause_sweep api.sweeps.resume_sweep
        api.sweeps.extend_sweep
    """,
    Right.ORDER: """
        pages.actions.move_to_front pages.actions.set_priority
        api.runs.set_priority api.runs.set_place
    """,
    Right.DELETE: """
        pages.run_bin.delete_run pages.run_bin.restore_run pages.run_bin.erase_run
        api.run_bin.delete_run api.run_bin.restore_run api.run_bin.erase_run
    """,
    COMMAND: """
        pages.new_command.new_command pages.new_command.submit_command
        pages.secrets.show_secrets api.secrets.list_secrets
    """,
    OPERATE: """
        pages.secrets.set_secret pages.secrets.delete_secret
        api.secrets.set_secret api.secrets.delete_secret
    """,
}
NAMES = MappingProxyType({Run: "run", Sweep: "sweep"})
#: What a route asks for, by module and name of its function.
NEEDS: Mapping[str, str] = MappingProxyType(
    {route: need for need, routes in _TABLE.items() for route in routes.split()}
)


def name_of(endpoint: object) -> str:
    """Return what a route's function is called in the table."""
    module = getattr(endpoint, "__module__", "").removeprefix("app.")
    return f"{module}.{getattr(endpoint, '__name__', '')}"


def admit(request: Request, session: Session, user: User) -> None:
    """See that somebody, whose session it is, may use a route, on what its address names.

    Raises NotFound of what they may not see, and Forbidden of what they may not do.
    """
    need = NEEDS.get(name_of(request.scope["endpoint"]), OPERATE)
    if user.is_operator or need == ANYBODY:
        return
    if need == OPERATE:
        raise Forbidden("Only an operator of this server may do this.")
    if need == COMMAND:
        if not user.runs_commands:
            raise Forbidden("Command lines need a right of their own, which operators give.")
        return
    table = Run if "run_id" in request.path_params else Sweep
    given = str(request.path_params.get("run_id") or request.path_params["sweep_id"])
    is_number = given.isdecimal() and len(given) <= len(str(LARGEST_ID))
    if not is_number or int(given) > LARGEST_ID:
        raise NotFound(f"There is no {NAMES[table]} {given[:50]}.")
    check(session, Right(need), int(given), table)


def check(session: Session, right: Right, row_id: int, table: type[Run | Sweep] = Run) -> None:
    """See that whose session it is may do something to a run or a sweep.

    Raises NotFound of what they may not see, and Forbidden of what they may not do.
    """
    standing = rights.limits(session)
    if standing is None or standing.is_operator:
        return
    row = session.execute(
        select(table.project, table.owner_id).where(table.id == row_id)
    ).one_or_none()
    if row is None:
        raise NotFound(f"There is no {NAMES[table]} {row_id}.")
    if not standing.may(right, row.project, row.owner_id):
        called = f"the project {row.project!r}" if row.project else "this project"
        raise Forbidden(f"Your role does not let you {DEEDS[right]} {called}.")
