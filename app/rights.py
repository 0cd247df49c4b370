"""Who may use which route: the one table of rights, which every signed-in request is held against.

A route that stands nowhere in it is an operator's alone, and a test walks all of them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from fastapi import Request
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.context import SAFE_METHODS
from app.in_flight import DOWNLOAD, EXPORT, STREAM
from db import rights
from db.errors import HalfstepError, NotFound
from db.rights import DEEDS, RIGHTS_OF_TOKENS, Right, Standing
from db.tables import FULL, LARGEST_ID, READ, STEER, SUBMIT, Run, Sweep, User


class Forbidden(HalfstepError):
    """Your role does not allow this."""


#: What is asked of nobody but to be signed in: it shows and changes one's own alone, or shows no
#: more than one's projects have, or asks for itself what a body names.
ANYBODY = "anybody"
#: What is a user's own, or outlives the token that made it: alert rules and their channels, views,
#: tokens, read-only links, presets, roles. Not for a token of one project.
ACCOUNT = "account"
#: For whoever may submit to some project.
SUBMITTER = "submitter"
#: For people at their browsers, and what is the whole instance's.
COMMAND, OPERATE = "command", "operate"
#: For whoever has a read-only link, of its runs alone, and for nobody by a sign-in.
LINK = "link"

_TABLE: dict[str, str] = {
    ANYBODY: """
        pages.runs.list_runs pages.run_bin.show_bin pages.comparison.compare
        pages.comparison.show_group pages.sweeps.list_sweeps pages.actions.cancel_runs
        pages.workers.list_workers pages.workers.show_worker pages.recipes.list_recipes
        pages.recipes.show_recipe pages.documents.show_first pages.documents.show_document
        api.streams.stream_list api.vocabulary.get_vocabulary api.runs.list_runs
        api.runs.submit_run api.grouping.list_groups api.estimates.estimate api.bulk.act_on_runs
        api.run_bin.list_bin api.sweeps.list_sweeps api.sweeps.begin_sweep
        api.comparison.get_group api.comparison.get_comparison api.comparison.get_series_of_runs
        api.workers.list_workers api.workers.stream_workers api.workers.list_recipes
        api.storage.get_storage pages.projects.list_projects pages.projects.change_project
        api.projects.list_projects api.projects.list_members api.projects.change_project
        api.presets.list_presets pages.charts.show_chart pages.notes.edit_note
        pages.notes.write_note api.notes.read_note api.notes.write_note
        pages.retention.show_rules pages.retention.set_rule pages.retention.end_rule
        api.retention.list_rules api.retention.preview_rule api.retention.set_rule
        api.retention.end_rule api.docs.openapi api.docs.docs api.unversioned.redirect
    """,
    ACCOUNT: """
        pages.sign_in.sign_out pages.alerts.show_alerts pages.alerts.make_rule
        pages.alerts.switch_rule pages.alerts.delete_rule pages.alerts.read_notices
        pages.alerts.lead_back pages.alerts.make_channel pages.alerts.switch_channel
        pages.alerts.delete_channel pages.alerts.test_channel pages.alerts.make_rule_of_run
        api.alerts.make_rule_of_run pages.views.save_view pages.views.delete_view
        pages.account.show_account pages.account.set_password pages.account.make_token
        pages.account.revoke_token pages.account.end_sign_ins api.views.list_views
        api.views.save_view api.views.delete_view api.tokens.list_tokens api.tokens.make_token
        api.tokens.revoke_token api.alerts.list_rules api.alerts.make_rule
        api.alerts.switch_rule api.alerts.delete_rule api.alerts.list_notices api.alerts.news
        api.alerts.read_notices api.alerts.list_channels api.alerts.make_channel
        api.alerts.switch_channel api.alerts.delete_channel api.alerts.test_channel
        api.alerts.list_deliveries pages.projects.set_role pages.projects.take_role
        api.projects.set_role api.projects.take_role pages.presets.save_preset
        pages.presets.delete_preset api.presets.save_preset api.presets.delete_preset
        pages.links.make_link pages.links.revoke_link api.links.list_links api.links.make_link
        api.links.revoke_link
    """,
    LINK: """
        pages.shared.show pages.shared.get_series
        pages.shared.get_comparison pages.shared.get_series_of_runs
    """,
    Right.SEE: """
        pages.run.show_run pages.sweeps.show_sweep api.runs.get_run api.runs.get_config
        api.streams.stream_run api.sweeps.get_sweep api.sweeps.list_trials
        api.sweeps.stream_sweep api.series.get_series api.series.get_flagged_steps
        api.series.get_events api.series.get_metrics api.series.get_metrics_summary
        api.series.get_log api.series.get_checkpoints api.system.get_system
        api.environment.get_environment
        api.diagnosis.get_findings api.diagnosis.get_histograms api.diagnosis.get_layer_norms
        api.diagnosis.get_headroom api.diagnosis.get_replays api.diagnosis.get_artifacts
    """,
    Right.DOWNLOAD: """
        downloads.download downloads.download_artifact downloads.download_log
        api.export.export_rows""",
    Right.SUBMIT: """
        pages.actions.go_on pages.comparison.queue_comparison
        api.runs.go_on api.comparison.compare
    """,
    SUBMITTER: """
        pages.new_run.new_run pages.new_run.other_recipe pages.new_run.submit_run
        pages.new_sweep.new_sweep pages.new_sweep.from_run pages.new_sweep.begin
        api.uploads.upload_weights
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
    Right.MOVE: """
        pages.actions.move_to_project api.runs.move_run
        pages.sweeps.move_to_project api.sweeps.move_sweep
    """,
    COMMAND: """
        pages.new_command.new_command pages.new_command.submit_command
        pages.new_command_sweep.new_sweep pages.new_command_sweep.from_run
        pages.new_command_sweep.begin
        pages.secrets.show_secrets api.secrets.list_secrets
    """,
    OPERATE: """
        pages.workers.drain pages.workers.undrain
        api.workers.drain_worker api.workers.undrain_worker
        pages.people.show_people pages.people.invite pages.people.change
        pages.deeds.show_deeds api.deeds.list_deeds api.deeds.export_deeds
        api.people.list_users api.people.invite api.people.change_user
        pages.projects.make_project api.projects.make_project
        pages.projects.set_quota api.projects.set_quota
        pages.projects.rename_project pages.projects.delete_project
        api.projects.rename_project api.projects.delete_project
        pages.secrets.set_secret pages.secrets.delete_secret
        api.secrets.set_secret api.secrets.delete_secret
    """,
}
#: What is said to them who have no such project.
NO_SUBMITTING = "Your role lets you submit no runs; ask a maintainer of a project."
OF_ONE_PROJECT = (
    "This token opens one project only: no account, no command lines, nothing of the whole server. "
    "Use a token without a project, or sign in."
)
NAMES = MappingProxyType({Run: "run", Sweep: "sweep"})
#: What tokens of each kind may.
KINDS = MappingProxyType(
    {
        READ: "look and download",
        SUBMIT: "look, download and submit",
        STEER: "look, download, submit and steer",
    }
)
#: What a route asks for, by module and name of its function.
NEEDS: Mapping[str, str] = MappingProxyType(
    {route: need for need, routes in _TABLE.items() for route in routes.split()}
)


def name_of(endpoint: object) -> str:
    """Return what a route's function is called in the table."""
    module = getattr(endpoint, "__module__", "").removeprefix("app.")
    return f"{module}.{getattr(endpoint, '__name__', '')}"


#: Routes that ask for themselves, and change things, which a token with this right may use.
ASKING = MappingProxyType(
    {
        Right.SUBMIT: (
            "api.runs.submit_run",
            "api.sweeps.begin_sweep",
            "api.uploads.upload_weights",
        ),
        Right.STEER: ("api.bulk.act_on_runs",),
    }
)


#: Routes that send as long as somebody listens.
STREAMS = (
    *("api.streams.stream_list", "api.streams.stream_run"),
    *("api.sweeps.stream_sweep", "api.workers.stream_workers"),
)


def kind_of(endpoint: object) -> str:
    """Return as what a request counts that may last, or nothing."""
    name = name_of(endpoint)
    if name in STREAMS:
        return STREAM
    if ".export_" in name:
        return EXPORT
    return DOWNLOAD if NEEDS.get(name) == Right.DOWNLOAD else ""


def admit(
    request: Request,
    session: Session,
    user: User,
    standing: Standing,
    kind: str = FULL,
    only: str | None = None,
) -> None:
    """See that somebody, whose session it is, may use a route, on what its address names.

    kind: of the token that they come with.  only: the one project that it opens, which lets it use
    no route of ACCOUNT, COMMAND or OPERATE, where any unlisted route belongs.  Raises NotFound
    of what they may not see, and Forbidden of what they may not do.
    """
    name = name_of(request.scope["endpoint"])
    need = NEEDS.get(name, OPERATE)
    if kind != FULL:
        _check_token(kind, request.method, name, need)
    if only is not None and need in (ACCOUNT, COMMAND, OPERATE):
        raise Forbidden(OF_ONE_PROJECT)
    if need == ACCOUNT:
        need = Right.SEE if "run_id" in request.path_params else ANYBODY
    if need == ANYBODY or (user.is_operator and need in (COMMAND, OPERATE)):
        return
    if need == OPERATE:
        raise Forbidden("Only an operator of this server may do this.")
    if need == SUBMITTER:
        if not standing.may_somewhere(Right.SUBMIT):
            raise Forbidden(NO_SUBMITTING)
        return
    if need == COMMAND:
        if not user.runs_commands:
            raise Forbidden("Command lines need a right of their own, which operators give.")
        return
    if user.is_operator and kind == FULL and only is None:
        return  # what there is not the route says for itself
    table = Run if "run_id" in request.path_params else Sweep
    given = str(request.path_params.get("run_id") or request.path_params["sweep_id"])
    is_number = given.isdecimal() and len(given) <= len(str(LARGEST_ID))
    if not is_number or int(given) > LARGEST_ID:
        raise NotFound(f"There is no {NAMES[table]} {given[:50]}.")
    check(session, Right(need), int(given), table)


def check_project(session: Session, right: Right, project: str, deed: str = "") -> None:
    """See that whose session it is may do something in a project. Raises NotFound, Forbidden.

    deed: in words, if the right allows several.
    """
    standing = rights.limits(session)
    if standing is None or standing.may(right, project):
        return
    if not standing.may(Right.SEE, project):
        if not project and right == Right.SUBMIT and not standing.may_somewhere(right):
            raise Forbidden(NO_SUBMITTING)
        raise NotFound(f"There is no project {project[:100]!r}.")
    raise Forbidden(_refusal(right, project, deed))


def _refusal(right: Right, project: str, deed: str = "") -> str:
    called = f"the project {project!r}" if project else "this project"
    return f"Your role does not let you {deed or DEEDS[right]} {called}."


def _check_token(kind: str, method: str, name: str, need: str) -> None:
    """See that a token of some kind may use a route at all. Raises Forbidden."""
    most = RIGHTS_OF_TOKENS[kind]
    is_allowed = (
        need in most
        or (need in (ANYBODY, ACCOUNT) and method in SAFE_METHODS)
        or any(name in names and right in most for right, names in ASKING.items())
    )
    if not is_allowed:
        raise Forbidden(f"This token may {KINDS[kind]} and nothing else: make another one.")


def check(session: Session, right: Right, row_id: int, table: type[Run | Sweep] = Run) -> None:
    """See that whose session it is may do something to a run or a sweep.

    Raises NotFound of what they may not see, and Forbidden of what they may not do.
    """
    standing = rights.limits(session)
    if standing is None:
        return
    row = session.execute(
        select(table.project, table.owner_id).where(table.id == row_id)
    ).one_or_none()
    if row is None:
        raise NotFound(f"There is no {NAMES[table]} {row_id}.")
    if not standing.may(right, row.project, row.owner_id):
        raise Forbidden(_refusal(right, row.project))
