"""The pages."""

from fastapi import APIRouter

from app.pages import (
    account,
    actions,
    alerts,
    charts,
    comparison,
    deeds,
    documents,
    links,
    new_command,
    new_run,
    notes,
    people,
    projects,
    recipes,
    retention,
    run,
    run_bin,
    runs,
    secrets,
    shared,
    sign_in,
    sweeps,
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
    run_bin,
    comparison,
    charts,
    notes,
    sweeps,
    workers,
    recipes,
    secrets,
    alerts,
    views,
    account,
    people,
    projects,
    retention,
    deeds,
    links,
    shared,
    documents,
):
    router.include_router(module.router)
