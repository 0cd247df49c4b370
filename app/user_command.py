"""`halfstep user`: user administration on the server's machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from sqlalchemy.orm import Session

from app.command_classes import ServiceCommand
from app.commands import open_installation, print_link
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
def _open_session() -> Iterator[tuple[Settings, Session]]:
    """Yield the settings and a session, which is committed unless an error is raised."""
    with open_installation() as (settings, database), database.writing() as session:
        yield settings, session


@user.command("add")
def _add(
    name: Name,
    role: Annotated[str, typer.Option(help="Role: viewer, member or maintainer")] = MEMBER,
    project: Project = projects.DEFAULT,
    admin: Annotated[
        bool, typer.Option("--admin", help="Make the user an admin with all permissions")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create an account, and print a link that signs it in once."""
    with _open_session() as (settings, session):
        made = people.invite(session, name, project=project, role=role)
        made.is_admin = admin
        audit.note_typed(session, "user add", made.name, role, project, "admin" * admin)
        token = accounts.make_link_token(session, made)
    print_link(settings, made.name, token, as_json=as_json)


@user.command("list")
def _list(as_json: AsJson = False) -> None:
    """List accounts with their roles."""
    with _open_session() as (_settings, session):
        for account, roles in people.list_people(session):
            texts = [f"{role} of {name or 'Default project'}" for name, role in roles.items()]
            texts = ["admin"] if account.is_admin else texts
            texts += ["may run commands"] if account.runs_commands else []
            texts += ["deactivated"] if account.deactivated_at is not None else []
            facts = {"name": account.name, "roles": roles, "admin": account.is_admin}
            facts["runs_commands"] = account.runs_commands
            facts["deactivated"] = account.deactivated_at is not None
            print_result(facts, f"{account.name}: {', '.join(texts) or 'no role'}", as_json=as_json)


@user.command("role")
def _give_role(
    name: Name,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="viewer, member, maintainer or none")],
    project: Project = projects.DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Set a user's role in a project; `none` revokes it."""
    with _open_session() as (_settings, session):
        account = people.named(session, name)
        audit.note_typed(session, "user role", account.name, role, project)
        if role == "none":
            projects.take_role(session, account, project)
        else:
            projects.set_role(session, account, project, role)
        print_result({"name": account.name, "project": project, "role": role}, "", as_json=as_json)


@user.command("change")
def _change(
    name: Name,
    change: Annotated[str, typer.Argument(metavar="CHANGE", help=", ".join(people.CHANGES))],
    as_json: AsJson = False,
) -> None:
    """Change an account: deactivate, activate, remove or reset it, or change its permissions."""
    if change not in people.CHANGES:
        allowed = ", ".join(people.CHANGES)
        raise Invalid({"change": f"{change[:100]!r} is not valid; allowed: {allowed}"})
    with _open_session() as (settings, session):
        account = people.named(session, name)
        people.CHANGES[change](session, account)  # type: ignore[index]
        audit.note_typed(session, "user change", account.name, change)
        token = accounts.make_link_token(session, account) if change == "reset" else ""
        changed = account.name
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
    with _open_session() as (_settings, session):
        account = people.named(session, name)
        people.set_subject(session, account, subject.strip())
        audit.note_typed(session, "user subject", account.name, subject.strip())
        print_result({"name": account.name, "subject": subject.strip()}, "", as_json=as_json)


@user.command("token")
def _make_token(
    run: Annotated[
        int, typer.Argument(metavar="RUN", min=1, max=LARGEST_ID, help="Number of a watched run")
    ],
    days: Annotated[int, typer.Option(help="Days until it expires")] = accounts.TOKEN_DAYS,
    as_json: AsJson = False,
) -> None:
    """Print a token that may only upload one watched run, as its owner."""
    with _open_session() as (_settings, session):
        owner = session.get_one(User, runs.get(session, run).owner_id)
        token, row = accounts.make_api_token(
            session, owner, f"run {run}", ONE_RUN, run_id=run, days=days
        )
        audit.note_typed(session, "user token", owner.name, f"run {run}")
        fields = {"id": row.id, "run": run, "name": owner.name, "token": token}
    text = f"It uploads run {run} as {fields['name']} for {days} days. It is not shown again."
    print_result(fields, f"{token}\n\n{text}", as_json=as_json)
