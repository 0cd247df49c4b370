"""The JSON API: all that the pages show and do, for scripts."""

from fastapi import APIRouter

from app.api import (
    diagnosis,
    docs,
    export,
    groups,
    ingest,
    runs,
    secrets,
    series,
    streams,
    system,
    tokens,
    unversioned,
    views,
    vocabulary,
    workers,
)

router = APIRouter()
modules = (
    streams,
    vocabulary,
    runs,
    views,
    groups,
    series,
    system,
    diagnosis,
    export,
    ingest,
    workers,
    tokens,
    secrets,
    docs,
)
for module in modules:
    router.include_router(module.router, prefix="/api/v1")
router.include_router(unversioned.router)
