"""The JSON API: all that the pages show and do, for scripts."""

from fastapi import APIRouter

from app.api import (
    alerts,
    bulk,
    diagnosis,
    docs,
    export,
    groups,
    ingest,
    run_bin,
    runs,
    secrets,
    series,
    storage,
    streams,
    system,
    tokens,
    unversioned,
    workers,
)

router = APIRouter()
modules = (
    streams,
    runs,
    bulk,
    run_bin,
    groups,
    series,
    system,
    diagnosis,
    export,
    ingest,
    workers,
    storage,
    tokens,
    secrets,
    alerts,
    docs,
)
for module in modules:
    router.include_router(module.router, prefix="/api/v1")
router.include_router(unversioned.router)
