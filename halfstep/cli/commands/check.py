"""`halfstep check`: what half precision loses in the first steps of a script."""

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halfstep.api_client.errors import ApiError
from halfstep.cli.application import single
from halfstep.cli.options import SomeProject

if TYPE_CHECKING:
    from halfstep.api_client.credentials import Credentials
    from halfstep.check.report import Report


@single(context_settings={"allow_interspersed_args": False})  # options after it are the script's
def app(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Training script, or a module with -m")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to check; 0 for all", min=0)] = 20,
    every: Annotated[int, typer.Option(help="Check each n-th step", min=1)] = 1,
    until_skip: Annotated[
        bool,
        typer.Option(
            "--until-skip",
            help="End with the first nonfinite loss or gradient outside of the search for a scale",
        ),
    ] = False,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run a module")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    format: Annotated[  # noqa: A002 - the option's name
        Literal["text", "github"], typer.Option(help="github: annotations of a workflow")
    ] = "text",
    baseline: Annotated[
        Path | None, typer.Option(help="JSON of an earlier check; report only what is new")
    ] = None,
    reproduce: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write scripts that show mistakes with torch alone"),
    ] = None,
    upload: Annotated[
        bool, typer.Option("--upload", help="Send the report and its sources to a server")
    ] = False,
    project: SomeProject = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Server; default: HALFSTEP_URL, or that of the login"),
    ] = None,
) -> None:
    """Run a training script unchanged, and report what half precision loses in its first steps.

    Each operator of these steps runs a second time in fp32. The script's own numbers stay equal to
    the bit; a step takes 2 to 20 times as long. The exit code is 1 if a mistake is certain.
    """
    from halfstep.check import report as reports
    from halfstep.check.runner import check_script
    from halfstep.check.session import CheckedSteps

    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"{script} is no file")
    try:
        known = None if baseline is None else reports.read(baseline)
    except (OSError, ValueError) as invalid:
        raise typer.BadParameter(f"--baseline: {baseline}: {invalid}") from invalid
    if not upload and (project is not None or server is not None):
        raise typer.BadParameter("--project and --server are of an upload; use --upload")
    login = _login(server, project or "") if upload else None
    is_quiet = as_json or format != "text"
    schedule = CheckedSteps(steps=steps, every=every, until_skip=until_skip)
    report, error = check_script(
        script,
        arguments or [],
        schedule,
        is_module=module,
        is_quiet=is_quiet,
        reproduce=reproduce,
    )
    if known is not None:
        report = report.without(known)
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
    if as_json:
        print(reports.as_json(report))
    elif format == "github":
        print(*reports.as_github(report), sep="\n")
    else:
        print(*reports.as_text(report), sep="\n")
    is_saved = login is None or not report.steps or _upload(report, login, project or "", is_quiet)
    if error is not None or not report.steps:
        why = "its script ended with an error" if error is not None else "no optimizer stepped"
        sys.exit(f"halfstep: the check is not complete: {why}")
    sys.exit(1 if report.has_fault or not is_saved else 0)


def _login(server: str | None, project: str) -> "Credentials":
    """Return URL and token of a server that takes checks of the project. Raises BadParameter."""
    from halfstep.client import Client
    from halfstep.session.run_upload import server_of

    login = server_of(server, None)
    if login is None:
        advice = "run `halfstep login`, or set HALFSTEP_URL and HALFSTEP_TOKEN"
        raise typer.BadParameter(f"--upload: no server or no token for it: {advice}")
    try:
        with Client(login.url, login.token) as client:
            client.upload_check({}, project=project)
    except ApiError as error:
        if list(error.errors) != ["report"]:  # the last that a server checks: all else is allowed
            raise typer.BadParameter(f"--upload: {error}") from error
    return login


def _upload(report: "Report", login: "Credentials", project: str, is_quiet: bool) -> bool:
    """Upload a report and print the address of its page, or write it to a file; return if sent."""
    from halfstep.check.upload import save, upload

    try:
        address, left_out = upload(report, login, project)
    except Exception as error:  # the script may have changed what sends it
        print(f"halfstep: the report is not uploaded: {error}", file=sys.stderr)
        print(f"halfstep: it is in {save(report)}", file=sys.stderr)
        return False
    for file in left_out:
        print(f"halfstep: {file} is too large to be uploaded", file=sys.stderr)
    print(f"Report: {address}", file=sys.stderr if is_quiet else sys.stdout)
    return True
