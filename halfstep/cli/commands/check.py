"""`halfstep check`: what half precision loses in the first steps of a script."""

import sys
import traceback
from pathlib import Path
from typing import Annotated, Literal

import typer

from halfstep.cli.application import single


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
        bool, typer.Option("--until-skip", help="End with the first nonfinite loss or gradient")
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
    if error is not None or not report.steps:
        why = "its script ended with an error" if error is not None else "no optimizer stepped"
        sys.exit(f"halfstep: the check is not complete: {why}")
    sys.exit(1 if report.has_fault else 0)
