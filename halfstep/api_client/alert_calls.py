"""Client calls about alerts: rules, alerts, channels and deliveries."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from halfstep.api_client.connection import Connection

if TYPE_CHECKING:
    from halfstep.api_client.response_types import (
        AlertRow,
        ChannelRow,
        CreatedChannel,
        DeliveryRow,
        RuleRow,
    )


class AlertCalls(Connection):
    """The part of `halfstep.Client` for alerts."""

    def alert(
        self,
        condition: str,
        *,
        value: float | None = None,
        run_id: int | None = None,
        project: str = "",
        all_runs: bool = False,
        metric: str = "",
        channels: Sequence[int] | None = None,
    ) -> "RuleRow":
        """Add an alert rule for a run, a project, or all your runs; for admins, of the service.

        condition: ended, collapsing, loss_above, …; see docs/how-to/alerts.md.  all_runs: all runs
        that you can view.  channels: ids of your channels; None: all that are enabled.
        """
        scope = "run" if run_id is not None else "project" if project else "all"
        rule = {"condition": condition, "value": value, "metric": metric}
        if scope != "all" or all_runs:  # otherwise by the condition: your runs, or the service
            rule["scope"] = scope
        ids = None if channels is None else list(channels)
        of = {"run_id": run_id, "project": project, "channel_ids": ids}
        return self._post("/api/v1/alerts/rules", rule | of)

    def alert_rules(self) -> "list[RuleRow]":
        """Return your rules, newest first."""
        return self._get("/api/v1/alerts/rules")

    def delete_alert(self, rule_id: int) -> None:
        """Delete one of your rules; its alerts stay."""
        self._delete(f"/api/v1/alerts/rules/{rule_id}")

    def alerts(self) -> "Iterator[AlertRow]":
        """Yield your alerts, newest first."""
        return self._pages("/api/v1/alerts/inbox", "alerts")

    def add_channel(self, kind: str, address: str, *, name: str = "") -> "CreatedChannel":
        """Add a channel: webhook or slack, with a URL, or email.

        The `secret` that signs a webhook's payloads is only in this response.
        """
        channel = {"kind": kind, "address": address, "name": name}
        return self._post("/api/v1/alerts/channels", channel)

    def channels(self) -> "list[ChannelRow]":
        """Return your channels by name."""
        return self._get("/api/v1/alerts/channels")

    def test_channel(self, channel_id: int) -> "DeliveryRow":
        """Send a test through a channel; `deliveries` has the result."""
        return self._post(f"/api/v1/alerts/channels/{channel_id}/tests")

    def delete_channel(self, channel_id: int) -> None:
        """Delete one of your channels, and its deliveries."""
        self._delete(f"/api/v1/alerts/channels/{channel_id}")

    def deliveries(self) -> "Iterator[DeliveryRow]":
        """Yield sent and pending deliveries of your channels, newest first."""
        return self._pages("/api/v1/alerts/deliveries", "deliveries")
