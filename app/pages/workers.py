"""The machines that train."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from app.auth import SignedIn
from app.context import Db
from app.rendering import page
from db import workers

router = APIRouter()


@router.get("/workers")
def list_workers(request: Request, session: Db, visitor: SignedIn) -> HTMLResponse:
    """Show who is up, with which devices, recipes and versions."""
    return page(request, "workers.html", visitor=visitor, everyone=workers.everyone(session))
