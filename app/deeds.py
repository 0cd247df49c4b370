"""Writing down who changed what: with every change that a signed-in request makes, in its own
transaction, so that there is no deed without a row, nor a row without its deed.

What is sent is not written down, and so no secret can be.
"""

from fastapi import Request
from sqlalchemy.orm import Session

from db.tables import LARGEST_ID, Deed, User

#: Changes nothing, or nothing but what its user alone sees.
LEFT_OUT = ("/runs/new", "/alerts/notices/reading", "/api/v1/alerts/notices/reading")
CHARACTERS = 200


def note(session: Session, user: User, request: Request, token: str | None) -> None:
    """Write down a request that changes something. token: the name of the one that it came with."""
    if request.url.path in LEFT_OUT:
        return
    run_id = str(request.path_params.get("run_id", ""))
    # One that is none is refused, and this with it, where the route's parameters are read.
    is_id = run_id.isdecimal() and len(run_id) <= len(str(LARGEST_ID))
    session.add(
        Deed(
            user_id=user.id,
            token=token,
            deed=f"{request.method} {request.url.path}"[:CHARACTERS],
            run_id=min(int(run_id), LARGEST_ID) if is_id else None,
            address=request.client.host[:64] if request.client else "",
        )
    )
