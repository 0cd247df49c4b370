"""Routes of alerts: rules, alerts, channels and deliveries."""

from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from app.auth.audit import audited, unaudited
from app.auth.authentication import AdmittedEarly, SignedIn
from app.auth.permissions import ACCOUNT
from app.auth.project_parameters import in_project
from app.auth.routing import Router
from app.dependencies import Db, TheSettings
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId, RunId, Text
from app.http.url_policy import forbidden
from db.access.permissions import Permission
from db.alerts import alerts, channels, deliveries, rules
from db.tables import AlertRule, Channel, Delivery

router = Router(tags=["alerts"])

#: Alerts shown at once in a browser's notification.
MOST_UNREAD = 5


class NewRule(Body):
    """A new alert rule."""

    condition: Text
    """A condition of docs/how-to/alerts.md: ended, collapsing, …"""
    scope: Annotated[
        Text,
        Field(
            description="run, project, mine, all or service; empty: mine, or service if the "
            "condition is one of the service"
        ),
    ] = ""
    value: float | None = None
    """Threshold, for conditions that have one"""
    metric: Annotated[Text, Field(description="Metric, for metric_above and metric_below")] = ""
    run_id: Annotated[RunId | None, Field(description="Run, for the scope run")] = None
    project: Annotated[Text, Field(description="Project, for the scope project")] = ""
    channel_ids: Annotated[list[RowId] | None, Field(max_length=100)] = None
    """Null: all enabled channels of the user"""


class RunRule(Body):
    """A new alert rule for one run."""

    condition: Text
    value: float | None = None


class RuleRow(BaseModel):
    """A rule with its description."""

    id: int
    condition: str
    scope: str
    value: float | None
    metric: str
    run_id: int | None
    project: str
    channel_ids: list[int]
    is_on: bool
    created_at: float
    text: str


class Switch(Body):
    """Switch of a rule or channel."""

    is_on: bool


class AlertRow(BaseModel):
    """An alert."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    rule_id: int | None
    run_id: Annotated[int | None, Field(description="Null for a condition on the service")]
    subject: Annotated[str, Field(description="Worker, project or host, for one on the service")]
    condition: str
    text: str
    content: dict[str, Any]
    created_at: float
    resolved_at: Annotated[float | None, Field(description="When the condition became false again")]
    read_at: float | None


class AlertList(ListPage):
    """Alerts, newest first."""

    alerts: list[AlertRow]


class UnreadAlerts(BaseModel):
    """Unread alerts, as a page's bell shows them."""

    unread: Annotated[int, Field(description="At most 100")]
    newest: list[AlertRow]


class Reading(Body):
    """The last alert to mark as read, with all before it."""

    up_to: RowId


class NewChannel(Body):
    """A new channel."""

    kind: Annotated[Text, Field(description="webhook, slack or email")]
    address: Annotated[str, Field(description="A URL, or an e-mail address")]
    name: Text = ""


class ChannelRow(BaseModel):
    """A channel; of a URL only the host is shown."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    kind: str
    name: str
    target: str
    is_on: bool
    created_at: float


class CreatedChannel(ChannelRow):
    """A newly created channel."""

    secret: Annotated[str, Field(description="Signing secret of a webhook. It is not shown again")]


class DeliveryRow(BaseModel):
    """A delivery of an alert or of a test through a channel."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    channel_id: int
    channel: str
    alert_id: Annotated[int | None, Field(description="Null for a test")]
    run_id: int | None
    body: str
    attempts: int
    answer: Annotated[
        str, Field(description="Response to the last attempt, at most 500 characters")
    ]
    is_delivered: bool
    created_at: float
    tried_at: float | None
    due_at: Annotated[float, Field(description="Time of the next attempt, if ended_at is null")]
    ended_at: float | None


class Deliveries(ListPage):
    """Deliveries, newest first."""

    deliveries: list[DeliveryRow]


@router.get("/alerts/rules", ACCOUNT)
def list_rules(session: Db, principal: SignedIn) -> list[RuleRow]:
    """List the user's rules."""
    return [_rule(row) for row in rules.rules(session, principal.user)]


@router.post("/alerts/rules", ACCOUNT, status_code=201)
@audited("condition", "scope", "run_id")
def make_rule(
    body: Annotated[
        NewRule, in_project(NewRule, Permission.VIEW_RUN, is_invalid=True, empty_is_none=True)
    ],
    session: Db,
    principal: SignedIn,
) -> RuleRow:
    """Create a rule, or return an identical one and enable it."""
    return _rule(rules.make(session, principal.user, **body.model_dump()))


@router.post("/runs/{run_id}/alerts", ACCOUNT, status_code=201, tags=["runs"])
def make_rule_of_run(run_id: RunId, body: RunRule, session: Db, principal: SignedIn) -> RuleRow:
    """Create a rule for one run, with all enabled channels of the user."""
    made = rules.make(
        *(session, principal.user),
        **body.model_dump(),
        scope=rules.RUN,
        run_id=run_id,
    )
    return _rule(made)


@router.patch("/alerts/rules/{rule_id}", ACCOUNT)
def switch_rule(rule_id: RowId, body: Switch, session: Db, principal: SignedIn) -> RuleRow:
    """Enable or disable a rule."""
    return _rule(rules.switch(session, principal.user, rule_id, is_on=body.is_on))


@router.delete("/alerts/rules/{rule_id}", ACCOUNT, status_code=204)
def delete_rule(rule_id: RowId, session: Db, principal: SignedIn) -> None:
    """Delete a rule; its alerts stay."""
    rules.delete(session, principal.user, rule_id)


@router.get("/alerts/inbox", ACCOUNT)
def list_alerts(
    session: Db, principal: SignedIn, after: After = "", limit: Limit = 100
) -> AlertList:
    """List the user's alerts."""
    page = alerts.list_alerts(session, principal.user, after=after, limit=limit)
    rows = [AlertRow.model_validate(row) for (row,) in page.rows]
    return AlertList(alerts=rows, total=page.total, next=page.next)


@router.get("/alerts/inbox/unread", ACCOUNT)
def list_unread_alerts(
    session: Db, principal: SignedIn, after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0
) -> UnreadAlerts:
    """Count the unread alerts. after: id of an alert; newer ones are returned too."""
    newest = alerts.newer(session, principal.user, after, most=MOST_UNREAD)
    rows = [AlertRow.model_validate(row) for row in newest]
    return UnreadAlerts(unread=alerts.unread(session, principal.user), newest=rows)


@router.post("/alerts/inbox/reading", ACCOUNT, status_code=204)
@unaudited("Marks the user's own alerts as read.")
def mark_alerts_read(body: Reading, session: Db, principal: SignedIn) -> None:
    """Mark the user's alerts up to the given one as read."""
    alerts.read(session, principal.user, body.up_to)


@router.get("/alerts/channels", ACCOUNT)
def list_channels(session: Db, principal: SignedIn) -> list[ChannelRow]:
    """List the user's channels."""
    return [
        ChannelRow.model_validate(row) for row in channels.list_channels(session, principal.user)
    ]


async def _forbidden(body: NewChannel, settings: TheSettings, _user: AdmittedEarly) -> str:
    return await forbidden(body.address.strip(), private=settings.alerts_allow_private_addresses)


#: Resolved before the session opens, so that no transaction waits for a name server.
ForbiddenAddress = Annotated[str, Depends(_forbidden)]


@router.post("/alerts/channels", ACCOUNT, status_code=201)
def make_channel(
    body: NewChannel,
    forbidden: ForbiddenAddress,
    session: Db,
    settings: TheSettings,
    principal: SignedIn,
) -> CreatedChannel:
    """Create a channel. Only this response contains a webhook's secret."""
    key_file, fields = settings.secrets_key, body.model_dump() | {"forbidden": forbidden}
    row, secret = channels.make(session, key_file, principal.user, **fields)
    return CreatedChannel(**ChannelRow.model_validate(row).model_dump(), secret=secret)


@router.patch("/alerts/channels/{channel_id}", ACCOUNT)
def switch_channel(channel_id: RowId, body: Switch, session: Db, principal: SignedIn) -> ChannelRow:
    """Enable or disable a channel. Alerts to a disabled channel are not delivered."""
    row = channels.switch(session, principal.user, channel_id, is_on=body.is_on)
    return ChannelRow.model_validate(row)


@router.delete("/alerts/channels/{channel_id}", ACCOUNT, status_code=204)
def delete_channel(channel_id: RowId, session: Db, principal: SignedIn) -> None:
    """Delete a channel and its deliveries."""
    channels.delete(session, principal.user, channel_id)


@router.post("/alerts/channels/{channel_id}/tests", ACCOUNT, status_code=201)
def test_channel(
    channel_id: RowId, session: Db, settings: TheSettings, principal: SignedIn
) -> DeliveryRow:
    """Send a test; its delivery shows the outcome within seconds."""
    row = deliveries.test(session, principal.user, channel_id, settings.address)
    return _delivery(row, channels.mine(session, principal.user, channel_id))


@router.get("/alerts/deliveries", ACCOUNT)
def list_deliveries(
    session: Db, principal: SignedIn, after: After = "", limit: Limit = 100
) -> Deliveries:
    """List the deliveries through the user's channels."""
    page = deliveries.list_deliveries(session, principal.user, after=after, limit=limit)
    rows = [_delivery(row, channel) for row, channel in page.rows]
    return Deliveries(deliveries=rows, total=page.total, next=page.next)


def _rule(row: AlertRule) -> RuleRow:
    fields = {name: getattr(row, name) for name in RuleRow.model_fields if name != "text"}
    return RuleRow(**fields, text=rules.describe(row))


def _delivery(row: Delivery, channel: Channel) -> DeliveryRow:
    fields = {name: getattr(row, name) for name in DeliveryRow.model_fields if name != "channel"}
    return DeliveryRow(**fields, channel=channel.name)
