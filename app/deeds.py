"""Writing down who changed what: with every change that a signed-in request makes, in its own
transaction, so that there is no deed without a row, nor a row without its deed.

What is sent is not written down, and so no secret can be.
"""

import json

from fastapi import Request
from sqlalchemy.orm import Session

from db.tables import Deed, User

#: Changes nothing, or nothing but what its user alone sees.
LEFT_OUT = ("/runs/new", "/alerts/notices/reading", "/api/v1/alerts/notices/reading")
CHARACTERS = 200


def note(session: Session, user: User, request: Request, token: str | None) -> None:
    """Write down a request that changes something. token: the name of the one that it came with."""
    path = str(request.scope["route"].path)
    if path in LEFT_OUT:
        return
    named = {**request.path_params}
    run_id = str(named.pop("run_id", ""))
    session.add(
        Deed(
            user_id=user.id,
            token=token,
            deed=f"{request.method} {path}",
            run_id=int(run_id) if run_id else None,
            subject=json.dumps(named)[:CHARACTERS] if named else "",
            address=request.client.host if request.client else "",
        )
    )
