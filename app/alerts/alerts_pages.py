"""Page of alerts: alerts, rules, channels and deliveries."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Form
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from app.alerts import smtp
from app.auth.audit import audited, unaudited
from app.auth.authentication import AdmittedEarly, SignedIn
from app.auth.permissions import ACCOUNT
from app.auth.project_parameters import form_project
from app.auth.routing import Router
from app.dependencies import Db, Posted, TheSettings
from app.html.rendering import Context
from app.http.parameters import FormText, RowId, RunId, Text, as_run_id
from app.http.url_policy import forbidden
from db.access.permissions import Permission
from db.alerts import alerts, channels, deliveries, rules
from db.alerts.alert_conditions import CONDITIONS
from db.alerts.service_conditions import SERVICE_CONDITIONS
from db.errors import Invalid
from db.settings import Settings

router = Router()

ROWS_SHOWN = 50
#: Initial values of the forms; channels: the selected ones, None for all enabled ones.
RULE: dict[str, object] = {
    **{"scope": rules.MINE, "condition": "", "value": "", "metric": ""},
    **{"run_id": "", "project": "", "channels": None},
}
CHANNEL = {"kind": channels.WEBHOOK, "name": "", "address": ""}


@dataclass
class Entered:
    """State of the page's forms."""

    rule: dict[str, object] = field(default_factory=RULE.copy)
    channel: dict[str, Any] = field(default_factory=CHANNEL.copy)
    errors: dict[str, str] = field(default_factory=dict)
    secret: str = ""  # of a webhook that was just created


@router.get("/alerts", ACCOUNT)
def show_alerts(
    context: Context, run: Text = "", after: Text = "", deliveries_after: Text = ""
) -> HTMLResponse:
    """Show the page. run: initial run in the form of a new rule."""
    entered = Entered(rule=RULE | ({"scope": rules.RUN, "run_id": run} if run else {}))
    return _alerts(context, entered, after, deliveries_after)


@router.post("/alerts/rules", ACCOUNT)
@audited("condition", "scope", "run_id")
def make_rule(
    context: Context,
    project: Annotated[str | None, form_project(Permission.VIEW_RUN, none="")],
    condition: FormText = "",
    scope: FormText = "",
    value: FormText = "",
    metric: FormText = "",
    run_id: FormText = "",
    channel: Annotated[list[RowId] | None, Form()] = None,
) -> Response:
    """Create a rule from the form."""
    fields: dict[str, Any] = {"condition": condition, "scope": scope}
    fields |= {"metric": metric, "project": project or ""}
    try:
        rules.make(
            context.session,
            context.user,
            **fields,
            value=_number(condition, value.strip()),
            run_id=as_run_id("run_id", run_id.strip()) if scope == rules.RUN else None,
            channel_ids=channel or [],
        )
    except Invalid as error:
        fields |= {"value": value, "run_id": run_id}
        entered = Entered(rule={**fields, "channels": channel or []}, errors=error.errors)
        return _alerts(context, entered)
    return context.redirect("/alerts#rules", "The rule is added.")


@router.post("/runs/{run_id}/alerts", ACCOUNT)
def make_rule_of_run(run_id: RunId, context: Context, condition: FormText = "") -> RedirectResponse:
    """Create a rule for a run, in a browser without JavaScript."""
    rules.make(context.session, context.user, condition=condition, scope=rules.RUN, run_id=run_id)
    return context.redirect("/alerts#rules", "The rule is added.")


@router.post("/alerts/rules/{rule_id}/switch", ACCOUNT)
def switch_rule(rule_id: RowId, context: Context, on: FormText = "") -> RedirectResponse:
    """Enable or disable a rule."""
    rules.switch(context.session, context.user, rule_id, is_on=bool(on))
    text = "The rule is enabled." if on else "The rule is disabled."
    return context.redirect("/alerts#rules", text)


@router.post("/alerts/rules/{rule_id}/deletion", ACCOUNT)
def delete_rule(rule_id: RowId, context: Context) -> RedirectResponse:
    """Delete a rule."""
    rules.delete(context.session, context.user, rule_id)
    return context.redirect("/alerts#rules", "The rule is deleted.")


@router.post("/alerts/inbox/reading", ACCOUNT)
@unaudited("Marks the user's own alerts as read.")
def mark_alerts_read(
    session: Db, principal: SignedIn, up_to: Annotated[RowId, Form()]
) -> RedirectResponse:
    """Mark the alerts up to the given one as read."""
    alerts.read(session, principal.user, up_to)
    return RedirectResponse("/alerts", status_code=303)


@router.get("/alerts/channels", ACCOUNT)
def lead_back() -> RedirectResponse:
    """Redirect to the channels: the page after creating a channel has this URL."""
    return RedirectResponse("/alerts#channels", status_code=303)


async def _forbidden(posted: Posted, settings: TheSettings, _user: AdmittedEarly) -> str:
    address = str(posted.get("address", "")).strip()
    return await forbidden(address, private=settings.alerts_allow_private_addresses)


#: Resolved before the session opens, so that no transaction waits for a name server.
ForbiddenAddress = Annotated[str, Depends(_forbidden)]


@router.post("/alerts/channels", ACCOUNT)
def make_channel(
    forbidden: ForbiddenAddress,
    context: Context,
    kind: FormText = "",
    name: FormText = "",
    address: Annotated[str, Form()] = "",
) -> Response:
    """Create a channel; a webhook's secret is shown once."""
    fields = {"kind": kind, "name": name, "address": address}
    try:
        key_file = context.settings.secrets_key
        checked = {**fields, "forbidden": forbidden}
        _row, secret = channels.make(context.session, key_file, context.user, **checked)
    except Invalid as error:
        entered = Entered(channel=fields, errors=error.errors)
        return _alerts(context, entered)
    if secret:
        return _alerts(context, Entered(secret=secret))
    return context.redirect("/alerts#channels", "The channel is added.")


@router.post("/alerts/channels/{channel_id}/switch", ACCOUNT)
def switch_channel(channel_id: RowId, context: Context, on: FormText = "") -> RedirectResponse:
    """Enable or disable a channel."""
    channels.switch(context.session, context.user, channel_id, is_on=bool(on))
    text = "The channel is enabled." if on else "The channel is disabled."
    return context.redirect("/alerts#channels", text)


@router.post("/alerts/channels/{channel_id}/deletion", ACCOUNT)
def delete_channel(channel_id: RowId, context: Context) -> RedirectResponse:
    """Delete a channel."""
    channels.delete(context.session, context.user, channel_id)
    return context.redirect("/alerts#channels", "The channel is deleted.")


@router.post("/alerts/channels/{channel_id}/tests", ACCOUNT)
def test_channel(channel_id: RowId, context: Context) -> RedirectResponse:
    """Send a test through a channel."""
    deliveries.test(context.session, context.user, channel_id, context.settings.address)
    return context.redirect("/alerts#deliveries", "A test is being sent.")


def _number(condition: str, text: str) -> float | None:
    """Parse the value; None for a condition without one, whose hidden field is ignored."""
    if not text or not (known := rules.ALL_CONDITIONS.get(condition)) or not known.value:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise Invalid({"value": f"{text[:100]!r} is not valid; allowed: a number"}) from error


def _alerts(
    context: Context, entered: Entered, after: str = "", deliveries_after: str = ""
) -> HTMLResponse:
    session = context.session
    user = context.user
    rows = alerts.list_alerts(session, user, after=after, limit=ROWS_SHOWN)
    sent = deliveries.list_deliveries(session, user, after=deliveries_after, limit=ROWS_SHOWN)
    mine = channels.list_channels(session, user)
    return context.render(
        "alerts/alerts.html",
        status_code=422 if entered.errors else 200,
        alerts=[row for (row,) in rows.rows],
        older=rows.next,
        unread=alerts.unread(session, user),
        rules=[(row, rules.describe(row)) for row in rules.rules(session, user)],
        channels=mine,
        names={channel.id: channel.name for channel in mine},
        deliveries=sent.rows,
        older_deliveries=sent.next,
        conditions=CONDITIONS,
        service_conditions=SERVICE_CONDITIONS if user.is_admin else {},
        sends_mail=_sends_mail(context.settings),
        server_url=context.settings.address,
        entered=entered,
    )


def _sends_mail(settings: Settings) -> bool:
    try:
        return smtp.smtp_server(settings) is not None
    except Invalid:
        return False
