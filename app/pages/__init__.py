"""The pages."""

from fastapi import APIRouter

from app.pages import (
    account,
    actions,
    alerts,
    groups,
    new_command,
    new_run,
    run,
    run_bin,
    runs,
    secrets,
    sign_in,
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
    run_bin,
    groups,
    workers,
    secrets,
    alerts,
    account,
):
    router.include_router(module.router)
