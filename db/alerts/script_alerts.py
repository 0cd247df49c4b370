"""Alerts that the script of a run sends to its owner."""

import json

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db import clock
from db.tables import Alert, Channel, Delivery, Run
from halfstep.telemetry import events

#: `condition` of these alerts, which no rule has.
SCRIPT = "script"
#: Limit per run: a loop may send one in each step.
MOST_ALERTS = 100
TEXT_CHARACTERS = 500


def send(session: Session, run: Run, alert: events.Alert) -> None:
    """Show an alert to the owner of a run, and deliver it through all channels that are on.

    Links begin with "/": the delivery completes them, since a worker does not know the address.
    """
    sent = select(func.count()).where(Alert.run_id == run.id, Alert.condition == SCRIPT)
    if (session.scalar(sent) or 0) >= MOST_ALERTS:
        return
    words = f"{alert.title}: {alert.text}" if alert.text else alert.title
    text = f"Run {run.id}, {run.name}: {words}"[:TEXT_CHARACTERS]
    content = {
        "event": "alert",
        "condition": SCRIPT,
        "level": alert.level,
        "text": text,
        "time": clock.current(session),
        "run": {"id": run.id, "name": run.name, "project": run.project, "url": f"/runs/{run.id}"},
    }
    owned: dict[str, object] = {"user_id": run.owner_id, "run_id": run.id}
    row = Alert(condition=SCRIPT, text=text, content=content, **owned)
    session.add(row)
    session.flush()
    channels = select(Channel.id).where(Channel.user_id == run.owner_id, Channel.is_on)
    for channel_id in session.scalars(channels).all():
        body = json.dumps(content)
        session.add(Delivery(channel_id=channel_id, alert_id=row.id, body=body, **owned))
