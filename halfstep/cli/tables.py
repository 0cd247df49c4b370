"""Tables on the terminal, by rich; plain text without colours where stdout is no terminal."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from halfstep import number_formats
from halfstep.cli import formats

if TYPE_CHECKING:
    from halfstep.api_client.response_types import ListedRun

#: Wide enough for any table: where there is no terminal, nothing is cut.
UNLIMITED_WIDTH = 100_000
STYLES = {
    "healthy": "green",
    "calibrating": "cyan",
    "frequent skips": "yellow",
    "collapsing": "red",
    "no updates": "bold red",
    "running": "green",
    "failed": "red",
    "diverged": "red",
    "no contact": "yellow",
}
RUN_COLUMNS = ("Run", "Name", "Status", "Step", "Loss", "Scale", "Skipped", "Health", "ETA")
RIGHT = {"Run", "Step", "Loss", "Scale", "Skipped", "ETA", "Steps/s", "Sweep", "Size"}
#: Columns that take several lines on a narrow terminal, and their least width.
LEAST = {"Name": 6, "Reason": 16, "Text": 16, "Culprits": 16}
#: Columns that a narrow terminal does without, in this order; "": first the gaps are halved.
OPTIONAL = ("", "Reason", "Owner", "Steps/s", "Skipped", "Loss", "Scale")


def console() -> Console:
    """Return a console for the current stdout."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(width=UNLIMITED_WIDTH, highlight=False, force_terminal=False, color_system=None)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """Return a table; a column whose cells are all empty is left out.

    On a narrow terminal optional columns are left out too.
    """
    cells = [[formats.plain(cell) for cell in row] for row in rows]
    shown = [i for i in range(len(columns)) if not cells or any(row[i] for row in cells)]
    widths = {i: max(map(cell_len, [columns[i], *(row[i] for row in cells)])) for i in shown}
    least = {i: min(widths[i], LEAST.get(columns[i], widths[i])) for i in shown}
    room, gap = console().width, 2
    for name in OPTIONAL:
        if sum(least[i] + gap for i in shown) - gap > room:
            gap, shown = 1, [i for i in shown if columns[i] != name]
    made = _empty_table(title, gap=gap)
    for index in shown:
        name = columns[index]
        justify: JustifyMethod = "right" if name in RIGHT else "left"
        is_fixed = least[index] == widths[index]
        made.add_column(
            name, justify=justify, no_wrap=is_fixed, min_width=least[index], overflow="fold"
        )
    for row in cells:
        made.add_row(*(Text(row[index], STYLES.get(row[index], "")) for index in shown))
    return made


def field_table(fields: Mapping[str, str], title: str = "") -> Table:
    """Return a table of two columns, without a header: names and values that are not empty."""
    made = _empty_table(title, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, text in fields.items():
        if text:
            made.add_row(Text(formats.plain(name)), Text(formats.plain(text), STYLES.get(text, "")))
    return made


def _empty_table(title: str, *, gap: int = 2, show_header: bool = True) -> Table:
    return Table(
        box=None,
        pad_edge=False,
        padding=(0, gap - 1, 0, 1),
        title=title or None,
        title_justify="left",
        title_style="bold",
        show_header=show_header,
    )


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table."""
    print_tables(table(columns, rows, title))


def print_tables(*tables: Table) -> None:
    """Print tables, an empty line between them."""
    target = console()
    for number, each in enumerate(tables):
        if number:
            target.print()
        if target.is_terminal:
            target.print(each)
            continue
        with target.capture() as captured:
            target.print(each)
        lines = captured.get().splitlines()
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))
    sys.stdout.flush()


def run_table(runs: "Iterable[ListedRun]", *extra: str, title: str = "") -> Table:
    """Return a table of runs; extra: Steps/s, Owner, Reason."""
    return table((*RUN_COLUMNS, *extra), [_run_row(run, extra) for run in runs], title)


def parts(first: Sequence[str], others: Sequence[Sequence[str]]) -> Iterator[slice]:
    """Yield as many of the other columns at a time as fit next to the first one."""
    room = console().width - max(map(cell_len, first))
    start, used = 0, 0
    for index, cells in enumerate(others):
        width = max(map(cell_len, cells)) + 2
        if index > start and used + width > room:
            yield slice(start, index)
            start, used = index, 0
        used += width
    yield slice(start, len(others))


def _run_row(run: "ListedRun", extra: Sequence[str]) -> list[str]:
    more = {
        "Steps/s": number_formats.number(run["steps_per_second"]),
        "Owner": run["owner"],
        "Reason": formats.reason(run),
    }
    left = run.get("seconds_left")
    return [
        str(run["id"]),
        run["name"],
        formats.state(run),
        formats.progress(run),
        formats.loss(run),
        formats.run_scale(run),
        formats.format_skipped(run),
        formats.health(run),
        number_formats.duration(left),
        *(more[name] for name in extra),
    ]
