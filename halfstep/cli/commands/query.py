"""`halfstep query`: SQL over runs, settings, steps and metrics."""

import sys
from datetime import datetime
from typing import Annotated, Any

import typer

from halfstep.cli.application import single
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson
from halfstep.cli.output import print_list
from halfstep.number_formats import number
from halfstep.telemetry.plain_json import json_safe


@single()
def app(
    sql: Annotated[str, typer.Argument(metavar="SQL", help="A query in the SQL of DuckDB")],
    runs_filter: Annotated[
        str, typer.Option("--filter", help="Only these runs, as on the page of runs")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Query runs, settings, steps and metrics in SQL; steps and metrics are fetched and cached."""
    try:
        import duckdb

        from halfstep.query.views import Views
    except ModuleNotFoundError as error:
        sys.exit(f"halfstep: {error.name} is required: pip install 'halfstep[query]'")
    with connect() as client:
        try:
            result = Views(client, runs_filter).execute(sql)
        except duckdb.Error as error:
            sys.exit(f"halfstep: {error}")
        columns = [name for name, *_ in result.description or ()]
        rows = (dict(zip(columns, row, strict=True)) for row in iter(result.fetchone, None))
        if as_json:
            rows = ({name: _plain(value) for name, value in row.items()} for row in rows)
        print_list(rows, columns, lambda row: [*map(_cell, row.values())], as_json=as_json)


def _plain(value: Any) -> object:
    return value.isoformat() if isinstance(value, datetime) else json_safe(value)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else str(value)
