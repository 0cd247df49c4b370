"""The pages."""

from fastapi import APIRouter

from app.pages import (
    account,
    actions,
    groups,
    new_command,
    new_run,
    run,
    runs,
    secrets,
    sign_in,
    views,
    workers,
)

router = APIRouter(include_in_schema=False)
for module in (
    sign_in,
    runs,
    new_run,
    new_command,
    actions,
    run,
    groups,
    workers,
    secrets,
    views,
    account,
):
    router.include_router(module.router)
