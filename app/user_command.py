"""`halfstep user`: who may sign in, from a terminal of the server's machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from sqlalchemy.orm import Session

from app.commands import ServiceCommand, installed, print_link
from db.access import accounts, audit, people, projects
from db.access.permissions import MEMBER
from db.errors import Invalid
from db.runs import runs
from db.settings import Settings
from db.tables import LARGEST_ID, ONE_RUN, User
from halfstep.cli.application import App
from halfstep.cli.options import AsJson
from halfstep.cli.output import print_result

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the user")]
Project = Annotated[str, typer.Option(help="Project; '' is the default project")]


user = App("Manage users: accounts, roles, sign-in links and tokens.", cls=ServiceCommand)


@contextmanager
def _installed() -> Iterator[tuple[Settings, Session]]:
    """Give the settings and a session, whose changes are committed if nothing is raised."""
    with installed() as (settings, database), database.writing() as session:
        yield settings, session


@user.command("add")
def _add(
    name: Name,
    role: Annotated[str, typer.Option(help="Role: viewer, member or maintainer")] = MEMBER,
    project: Project = projects.DEFAULT,
    admin: Annotated[
        bool, typer.Option("--operator", help="Make it an operator, who may do everything")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create an account, and print a link that signs it in once."""
    with _installed() as (settings, session):
        made = people.invite(session, name, project=project, role=role)
        made.is_admin = admin
        audit.note_typed(session, "user add", made.name, role, project, "operator" * admin)
        token = accounts.make_link_token(session, made)
    print_link(settings, made.name, token, as_json=as_json)


@user.command("list")
def _list(as_json: AsJson = False) -> None:
    """List accounts with their roles."""
    with _installed() as (_settings, session):
        for who, roles in people.listed(session):
            told = [f"{role} of {name or 'Default project'}" for name, role in roles.items()]
            told = ["operator"] if who.is_admin else told
            told += ["may run commands"] if who.runs_commands else []
            told += ["deactivated"] if who.deactivated_at is not None else []
            facts = {"name": who.name, "roles": roles, "operator": who.is_admin}
            facts["runs_commands"] = who.runs_commands
            facts["deactivated"] = who.deactivated_at is not None
            print_result(facts, f"{who.name}: {', '.join(told) or 'no role'}", as_json=as_json)


@user.command("role")
def _give_role(
    name: Name,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="viewer, member, maintainer or none")],
    project: Project = projects.DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Set a user's role in a project; `none` revokes it."""
    with _installed() as (_settings, session):
        who = people.named(session, name)
        audit.note_typed(session, "user role", who.name, role, project)
        if role == "none":
            projects.take_role(session, who, project)
        else:
            projects.set_role(session, who, project, role)
        print_result({"name": who.name, "project": project, "role": role}, "", as_json=as_json)


@user.command("change")
def _change(
    name: Name,
    change: Annotated[str, typer.Argument(metavar="CHANGE", help=", ".join(people.CHANGES))],
    as_json: AsJson = False,
) -> None:
    """Change an account: deactivate, reactivate, remove or reset it, or change its permissions."""
    if change not in people.CHANGES:
        allowed = ", ".join(people.CHANGES)
        raise Invalid({"change": f"{change[:100]!r} is not allowed; allowed: {allowed}"})
    with _installed() as (settings, session):
        who = people.named(session, name)
        people.CHANGES[change](session, who)  # type: ignore[index]
        audit.note_typed(session, "user change", who.name, change)
        token = accounts.make_link_token(session, who) if change == "reset" else ""
        changed = who.name
    if token:
        print_link(settings, changed, token, as_json=as_json)
    else:
        print_result({"name": changed, "change": change}, "", as_json=as_json)


@user.command("subject")
def _set_subject(
    name: Name,
    subject: Annotated[
        str,
        typer.Argument(metavar="SUBJECT", help="Issuer and subject of the provider; '' removes it"),
    ],
    as_json: AsJson = False,
) -> None:
    """Link an account to an identity provider: "https://provider 1234"."""
    with _installed() as (_settings, session):
        who = people.named(session, name)
        people.set_subject(session, who, subject.strip())
        audit.note_typed(session, "user subject", who.name, subject.strip())
        print_result({"name": who.name, "subject": subject.strip()}, "", as_json=as_json)


@user.command("token")
def _make_token(
    run: Annotated[
        int, typer.Argument(metavar="RUN", min=1, max=LARGEST_ID, help="Number of a watched run")
    ],
    days: Annotated[int, typer.Option(help="Days until it expires")] = accounts.TOKEN_DAYS,
    as_json: AsJson = False,
) -> None:
    """Print a token that may only send one watched run, as its owner."""
    with _installed() as (_settings, session):
        owner = session.get_one(User, runs.get(session, run).owner_id)
        token, row = accounts.make_api_token(
            session, owner, f"run {run}", ONE_RUN, run_id=run, days=days
        )
        audit.note_typed(session, "user token", owner.name, f"run {run}")
        told = {"id": row.id, "run": run, "name": owner.name, "token": token}
    said = f"It sends run {run} in {told['name']}'s name for {days} days. It is not shown again."
    print_result(told, f"{token}\n\n{said}", as_json=as_json)
