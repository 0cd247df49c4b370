"""`halfstep alert COMMAND`: alert rules and channels."""

from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.application import App
from halfstep.cli.connection import connect
from halfstep.cli.options import AsJson
from halfstep.cli.output import print_json, print_result

if TYPE_CHECKING:
    from halfstep.api_client.response_types import ChannelRow, RuleRow

app = App("List, add or remove alert rules, or test a channel.")


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List your alert rules, and the channels that they use."""
    with connect() as client:
        rules, channels = client.alert_rules(), client.channels()
    if as_json:
        print_json([*rules, *channels])
        return
    from halfstep.cli.tables import print_tables, table

    rule_rows = [(str(rule["id"]), rule["text"], _state(rule)) for rule in rules]
    channel_rows = [
        (str(row["id"]), row["kind"], row["name"], row["target"], _state(row)) for row in channels
    ]
    tables = [table(("Rule", "Text", "State"), rule_rows)]
    if channel_rows:
        tables.append(table(("Channel", "Kind", "Name", "Target", "State"), channel_rows))
    print_tables(*tables)


def _state(row: "RuleRow | ChannelRow") -> str:
    return "on" if row["is_on"] else "off"


@app.command()
def add(
    condition: Annotated[
        str,
        typer.Argument(metavar="CONDITION", help="ended, failed, collapsing, loss_above, …"),
    ],
    value: Annotated[
        float | None, typer.Option(help="Threshold, for conditions that have one")
    ] = None,
    metric: Annotated[str, typer.Option(help="Metric, for metric_above and metric_below")] = "",
    run_id: Annotated[
        int | None, typer.Option("--run", help="Only this run; default: all of your runs")
    ] = None,
    project: Annotated[str | None, typer.Option(help="All runs of this project")] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="All runs that you may see")] = False,
    channels: Annotated[
        list[int] | None,
        typer.Option(
            "--channel",
            help="Channel in addition to the page; default: all enabled ones; repeatable",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add an alert rule: `alert add collapsing`, `alert add no_progress --value 30 --run 7`.

    The conditions are in docs/how-to/alerts.md; those of the service are for admins.
    """
    if sum((run_id is not None, project is not None, all_runs)) > 1:
        raise typer.BadParameter("use only one of --run, --project and --all")
    with connect() as client:
        rule = client.alert(
            condition,
            value=value,
            metric=metric,
            run_id=run_id,
            project=project or "",
            all_runs=all_runs,
            channels=channels or None,
        )
    print_result(rule, f"rule {rule['id']}: {rule['text']}", as_json=as_json)


@app.command()
def remove(
    rule: Annotated[int, typer.Argument(metavar="RULE", help="Number of the rule")],
    as_json: AsJson = False,
) -> None:
    """Delete an alert rule; its alerts stay."""
    with connect() as client:
        client.delete_alert(rule)
    print_result({"id": rule, "removed": True}, f"removed rule {rule}", as_json=as_json)


@app.command("test")
def send_test(
    channel: Annotated[
        int, typer.Argument(metavar="CHANNEL", help="Number of the channel, from `alert list`")
    ],
    as_json: AsJson = False,
) -> None:
    """Send a test through a channel; the page and `deliveries` of the client show the response."""
    with connect() as client:
        delivery = client.test_channel(channel)
    print_result(delivery, f"sending a test through channel {channel}", as_json=as_json)
