"""Be told: rules, notices, channels and their deliveries."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from app.auth.audit import audited, unaudited
from app.auth.authentication import AdmittedEarly, SignedIn
from app.auth.permissions import ACCOUNT, requires
from app.dependencies import Db, TheSettings
from app.http.list_pages import After, Limit, ListPage
from app.http.parameters import Body, RowId, RunId, Text
from app.http.url_policy import forbidden
from db.alerts import alerts, channels, deliveries, rules
from db.tables import AlertRule, Channel, Delivery

router = APIRouter(tags=["alerts"])

#: What a bell shows in a browser, so many at once.
MOST_NEWS = 5


class NewRule(Body):
    """What to be told of."""

    condition: Annotated[
        Text, Field(description="One of docs/how-to/alerts.md: ended, collapsing, …")
    ]
    scope: Annotated[Text, Field(description="run, project, mine or all")] = rules.MINE
    value: Annotated[float | None, Field(description="Of a condition that has one")] = None
    metric: Annotated[Text, Field(description="Of metric_above and metric_below")] = ""
    run_id: Annotated[RunId | None, Field(description="Of the scope run")] = None
    project: Annotated[Text, Field(description="Of the scope project")] = ""
    channel_ids: Annotated[
        list[RowId] | None,
        Field(description="Beside the page; all of yours that are on, if null", max_length=100),
    ] = None


class RunRule(Body):
    """What to be told of one run."""

    condition: Text
    value: float | None = None


class RuleRow(BaseModel):
    """A rule, and what it says in words."""

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
    """Whether it is on."""

    is_on: bool


class AlertRow(BaseModel):
    """A notice. resolved_at: when its condition held no longer."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    rule_id: int | None
    run_id: int
    condition: str
    text: str
    content: dict[str, Any]
    created_at: float
    resolved_at: float | None
    read_at: float | None


class AlertList(ListPage):
    """Notices, newest first."""

    alerts: list[AlertRow]


class News(BaseModel):
    """What a page's bell shows: how many are not read, at most 100, and the newest of them."""

    unread: int
    newest: list[AlertRow]


class Reading(Body):
    """Up to which notice all is read."""

    up_to: RowId


class NewChannel(Body):
    """How to be told."""

    kind: Annotated[Text, Field(description="webhook, slack or email")]
    address: Annotated[str, Field(description="A URL, or an address of e-mail")]
    name: Text = ""


class ChannelRow(BaseModel):
    """A channel; of a URL the host alone is shown."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    kind: str
    name: str
    target: str
    is_on: bool
    created_at: float


class MadeChannel(ChannelRow):
    """A channel just made."""

    secret: Annotated[str, Field(description="Of a webhook: it signs. It is not shown again")]


class DeliveryRow(BaseModel):
    """A notice, or a test, on its way through a channel."""

    model_config = ConfigDict(from_attributes=True)

    id: int
    channel_id: int
    channel: str
    alert_id: Annotated[int | None, Field(description="Null of a test")]
    run_id: int | None
    body: str
    attempts: int
    answer: Annotated[str, Field(description="To the last attempt, at most 500 characters")]
    is_delivered: bool
    created_at: float
    tried_at: float | None
    due_at: Annotated[float, Field(description="When it is tried next, if ended_at is null")]
    ended_at: float | None


class Deliveries(ListPage):
    """Deliveries, newest first."""

    deliveries: list[DeliveryRow]


@router.get("/alerts/rules")
@requires(ACCOUNT)
def list_rules(session: Db, principal: SignedIn) -> list[RuleRow]:
    """List your rules."""
    return [_rule(row) for row in rules.rules(session, principal.user)]


@router.post("/alerts/rules", status_code=201)
@requires(ACCOUNT)
@audited("condition", "scope", "run_id")
def make_rule(wanted: NewRule, session: Db, principal: SignedIn) -> RuleRow:
    """Make a rule; one that says the same already is switched on and answered with."""
    return _rule(rules.make(session, principal.user, **wanted.model_dump()))


@router.post("/runs/{run_id}/alerts", status_code=201, tags=["runs"])
@requires(ACCOUNT)
def make_rule_of_run(run_id: RunId, wanted: RunRule, session: Db, principal: SignedIn) -> RuleRow:
    """Make a rule of one run, with all your channels that are on."""
    made = rules.make(
        *(session, principal.user),
        **wanted.model_dump(),
        scope=rules.RUN,
        run_id=run_id,
    )
    return _rule(made)


@router.patch("/alerts/rules/{rule_id}")
@requires(ACCOUNT)
def switch_rule(rule_id: RowId, wanted: Switch, session: Db, principal: SignedIn) -> RuleRow:
    """Switch a rule on or off."""
    return _rule(rules.switch(session, principal.user, rule_id, is_on=wanted.is_on))


@router.delete("/alerts/rules/{rule_id}", status_code=204)
@requires(ACCOUNT)
def delete_rule(rule_id: RowId, session: Db, principal: SignedIn) -> None:
    """Delete a rule; its notices stay."""
    rules.delete(session, principal.user, rule_id)


@router.get("/alerts/inbox")
@requires(ACCOUNT)
def list_alerts(
    session: Db, principal: SignedIn, after: After = "", limit: Limit = 100
) -> AlertList:
    """List what you were told of."""
    found = alerts.listed(session, principal.user, after=after, limit=limit)
    rows = [AlertRow.model_validate(row) for (row,) in found.rows]
    return AlertList(alerts=rows, total=found.total, next=found.next)


@router.get("/alerts/inbox/news")
@requires(ACCOUNT)
def news(
    session: Db, principal: SignedIn, than: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0
) -> News:
    """Count what is not read; than: a notice, after which the newest are wanted too."""
    newest = alerts.newer(session, principal.user, than, most=MOST_NEWS)
    rows = [AlertRow.model_validate(row) for row in newest]
    return News(unread=alerts.unread(session, principal.user), newest=rows)


@router.post("/alerts/inbox/reading", status_code=204)
@unaudited
@requires(ACCOUNT)
def mark_alerts_read(wanted: Reading, session: Db, principal: SignedIn) -> None:
    """Note that you have read what there was up to a notice."""
    alerts.read(session, principal.user, wanted.up_to)


@router.get("/alerts/channels")
@requires(ACCOUNT)
def list_channels(session: Db, principal: SignedIn) -> list[ChannelRow]:
    """List your channels."""
    return [ChannelRow.model_validate(row) for row in channels.listed(session, principal.user)]


async def _forbidden(wanted: NewChannel, settings: TheSettings, _user: AdmittedEarly) -> str:
    return await forbidden(wanted.address.strip(), private=settings.alerts_allow_private_addresses)


#: Comes before the session: no transaction waits for a name server.
ForbiddenAddress = Annotated[str, Depends(_forbidden)]


@router.post("/alerts/channels", status_code=201)
@requires(ACCOUNT)
def make_channel(
    wanted: NewChannel,
    forbidden: ForbiddenAddress,
    session: Db,
    settings: TheSettings,
    principal: SignedIn,
) -> MadeChannel:
    """Make a channel. A webhook's secret is in this answer and in no other."""
    key_file, what = settings.secrets_key, wanted.model_dump() | {"forbidden": forbidden}
    row, secret = channels.make(session, key_file, principal.user, **what)
    return MadeChannel(**ChannelRow.model_validate(row).model_dump(), secret=secret)


@router.patch("/alerts/channels/{channel_id}")
@requires(ACCOUNT)
def switch_channel(
    channel_id: RowId, wanted: Switch, session: Db, principal: SignedIn
) -> ChannelRow:
    """Switch a channel on or off: what is to go through one that is off goes nowhere."""
    row = channels.switch(session, principal.user, channel_id, is_on=wanted.is_on)
    return ChannelRow.model_validate(row)


@router.delete("/alerts/channels/{channel_id}", status_code=204)
@requires(ACCOUNT)
def delete_channel(channel_id: RowId, session: Db, principal: SignedIn) -> None:
    """Delete a channel, and what went through it."""
    channels.delete(session, principal.user, channel_id)


@router.post("/alerts/channels/{channel_id}/tests", status_code=201)
@requires(ACCOUNT)
def test_channel(
    channel_id: RowId, session: Db, settings: TheSettings, principal: SignedIn
) -> DeliveryRow:
    """Send a test; its delivery tells, seconds later, what came of it."""
    row = deliveries.test(session, principal.user, channel_id, settings.address)
    return _delivery(row, channels.mine(session, principal.user, channel_id))


@router.get("/alerts/deliveries")
@requires(ACCOUNT)
def list_deliveries(
    session: Db, principal: SignedIn, after: After = "", limit: Limit = 100
) -> Deliveries:
    """List what went through your channels, or is to."""
    found = deliveries.listed(session, principal.user, after=after, limit=limit)
    rows = [_delivery(row, channel) for row, channel in found.rows]
    return Deliveries(deliveries=rows, total=found.total, next=found.next)


def _rule(row: AlertRule) -> RuleRow:
    said = {name: getattr(row, name) for name in RuleRow.model_fields if name != "text"}
    return RuleRow(**said, text=rules.describe(row))


def _delivery(row: Delivery, channel: Channel) -> DeliveryRow:
    said = {name: getattr(row, name) for name in DeliveryRow.model_fields if name != "channel"}
    return DeliveryRow(**said, channel=channel.name)
