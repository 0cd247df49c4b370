"""`halfstep alert COMMAND`: alert rules and channels."""

import argparse
import json
from typing import Any

from halfstep.cli.typed import carry_out, parser_of
from halfstep.client import Client


def rules(words: list[str]) -> None:
    """List your rules, and the channels that they go through."""
    parser = parser_of("alert list", rules)
    options = parser.parse_args(words)
    with Client() as client:
        for rule in client.alert_rules():
            _tell(rule, _rule_line(rule), options)
        for channel in client.channels():
            _tell(channel, _channel_line(channel), options)


def add(words: list[str]) -> None:
    """Add an alert rule: `alert add collapsing`, `alert add no_progress
    --value 30 --run 7`.
    """
    parser = parser_of("alert add", add, "The conditions are in docs/how-to/alerts.md")
    parser.add_argument("condition", help="ended, failed, collapsing, loss_above, …")
    parser.add_argument("--value", type=float, help="of a condition that has one")
    parser.add_argument("--metric", default="", help="of metric_above and metric_below")
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--run", type=int, help="of this run; else of any of yours")
    of.add_argument("--project", default="", help="of any run of a project")
    of.add_argument("--everybody", action="store_true", help="of all runs that you see")
    parser.add_argument(
        "--channel",
        action="append",
        type=int,
        dest="channels",
        metavar="NUMBER",
        help="beside the page; all that are on, if not told",
    )
    options = parser.parse_args(words)
    with Client() as client:
        made = client.alert(
            options.condition,
            value=options.value,
            metric=options.metric,
            run_id=options.run,
            project=options.project,
            everybody=options.everybody,
            channels=options.channels,
        )
    _tell(made, _rule_line(made), options)


def remove(words: list[str]) -> None:
    """Delete a rule; its alerts stay."""
    parser = parser_of("alert remove", remove)
    parser.add_argument("rule", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        client.delete_alert(options.rule)
    _tell({"id": options.rule, "removed": True}, f"rule {options.rule} is removed", options)


def test(words: list[str]) -> None:
    """Send a test through a channel; `deliveries` of the client and the page show the response."""
    parser = parser_of("alert test", test)
    parser.add_argument("channel", type=int, help="its number, as `alert list` has it")
    options = parser.parse_args(words)
    with Client() as client:
        sent = client.test_channel(options.channel)
    _tell(sent, f"a test is on its way through channel {options.channel}", options)


ALERT = {"list": rules, "add": add, "remove": remove, "test": test}


def alert(words: list[str]) -> None:
    """List, add or remove alert rules, or test a channel."""
    carry_out("alert", alert, ALERT, words)


def _tell(found: dict[str, Any], line: str, options: argparse.Namespace) -> None:
    print(json.dumps(found) if options.json else line, flush=True)


def _rule_line(rule: dict[str, Any]) -> str:
    off = "" if rule["is_on"] else "  (off)"
    return f"rule    {rule['id']:>6}  {rule['text']}{off}"


def _channel_line(channel: dict[str, Any]) -> str:
    off = "" if channel["is_on"] else "  (off)"
    return (
        f"channel {channel['id']:>6}  {channel['kind']} {channel['name']} {channel['target']}{off}"
    )
