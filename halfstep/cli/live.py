"""Live status of runs on the terminal; elsewhere a line per change."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from halfstep.cli import formats
from halfstep.cli.output import print_json, print_result, say, warn

if TYPE_CHECKING:
    from halfstep.api_client.response_types import RunDetail, RunSummary
    from halfstep.client import Client

#: Of a command that waits for the end. 1: the server refused; 2: typed wrongly; 130: Ctrl-C.
EXIT_CODES = {"finished": 0, "failed": 3, "cancelled": 4}
LEARNED_NOTHING = 5


def follow_run(client: "Client", run_id: int, *, as_json: bool) -> int:
    """Show the status of a run until it ends; return the exit code."""
    states = client.follow(run_id, on_outage=warn)
    if as_json:
        return exit_code(_print(states, lambda run: print_json([run])))
    if not sys.stdout.isatty():
        return exit_code(_print(states, lambda run: say(formats.run_line(run))))
    from rich.live import Live
    from rich.text import Text

    from halfstep.cli.tables import STYLES, console

    with Live(console=console(), auto_refresh=False) as live:

        def show(run: "RunDetail") -> None:
            line = formats.plain(formats.run_line(run))
            style = STYLES.get(formats.health(run), "")
            text = Text(line, overflow="fold")
            text.highlight_words([formats.health(run)], style)
            live.update(text, refresh=True)

        return exit_code(_print(states, show))


def wait_for_run(client: "Client", run_id: int, *, as_json: bool) -> int:
    """Wait for the end of a run and print it; return the exit code."""
    if not as_json and sys.stdout.isatty():
        return follow_run(client, run_id, as_json=False)
    run = client.wait(run_id, on_outage=warn)
    print_result(run, formats.run_line(run), as_json=as_json)
    return exit_code(run)


def _print(states: "Iterator[RunDetail]", show: "Callable[[RunDetail], None]") -> "RunDetail":
    for run in states:
        show(run)
    return run  # `states` ends with an ended run


def exit_code(run: "RunSummary") -> int:
    """Return the exit code for the outcome of a run."""
    is_lost = run.get("outcome") in ("diverged", "no_updates")
    return LEARNED_NOTHING if is_lost else EXIT_CODES[run["status"]]


def show_refreshed(read: Callable[[], Any], interval: float) -> None:
    """Show what `read` returns, a table, and refresh it until Ctrl-C."""
    from rich.live import Live

    from halfstep.cli.tables import console

    try:
        with Live(read(), console=console(), auto_refresh=False) as live:
            live.refresh()
            while True:
                time.sleep(interval)
                live.update(read(), refresh=True)
    except KeyboardInterrupt:
        return
