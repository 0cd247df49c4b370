"""Login throttling: failed attempts, shared by all servers, that make a client wait.

The wait grows with each further attempt. The table is bounded by the attempts possible within
FORGET_SECONDS: each costs an Argon2 verification, of which a server runs a few at once.
"""

from typing import Any

from sqlalchemy import delete, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db import clock
from db.errors import HalfstepError
from db.tables import LoginAttempts

#: Attempts without a wait. Many users may share one address.
FREE_ATTEMPTS = {"address": 20, "name": 5}
MOST_SECONDS = 60.0
#: Time without an attempt after which the counter is reset.
FORGET_SECONDS = 600.0


class TooManyAttempts(HalfstepError):
    """Too many sign-in attempts."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        unit = "second" if seconds == 1 else "seconds"
        super().__init__(f"Too many wrong passwords. Try again in {seconds} {unit}.")


def take(session: Session, **who: str) -> None:
    """Count an attempt by address and name before its verification. Raises TooManyTries."""
    moment = clock.current(session)
    session.execute(delete(LoginAttempts).where(LoginAttempts.tried_at < moment - FORGET_SECONDS))
    dialect: Any = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    rows = [
        {"kind": kind, "who": key, "count": 0, "tried_at": moment, "open_at": moment}
        for kind, key in sorted(who.items())  # in a fixed order, to avoid deadlocks
    ]
    session.execute(dialect.insert(LoginAttempts).values(rows).on_conflict_do_nothing())
    mine = select(LoginAttempts).where(
        tuple_(LoginAttempts.kind, LoginAttempts.who).in_(who.items())
    )
    attempts = session.scalars(mine.order_by(LoginAttempts.kind).with_for_update()).all()
    if (wait := max(attempt.open_at for attempt in attempts) - moment) > 0:
        raise TooManyAttempts(int(-(-wait // 1)))
    for attempt in attempts:
        attempt.count, attempt.tried_at = attempt.count + 1, moment
        extra = attempt.count - FREE_ATTEMPTS[attempt.kind]
        pause = min(2.0 ** min(extra, 10), MOST_SECONDS) if extra >= 0 else 0.0
        attempt.open_at = moment + pause
    session.flush()


def release(session: Session, **who: str) -> None:
    """Delete the failed attempts of a user who knew the password, for that name only.

    Otherwise a user could reset the counter while guessing other passwords.
    """
    address = update(LoginAttempts).where(
        LoginAttempts.kind == "address", LoginAttempts.who == who["address"]
    )
    fewer = address.where(LoginAttempts.count > 0).values(
        count=LoginAttempts.count - 1, open_at=0.0
    )
    session.execute(fewer.execution_options(synchronize_session=False))
    name = delete(LoginAttempts).where(
        LoginAttempts.kind == "name", LoginAttempts.who == who["name"]
    )
    session.execute(name.execution_options(synchronize_session=False))
