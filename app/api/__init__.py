"""The JSON API: all that the pages show and do, for scripts."""

from fastapi import APIRouter

from app.api import (
    comparison,
    diagnosis,
    docs,
    export,
    ingest,
    runs,
    secrets,
    series,
    streams,
    sweeps,
    system,
    tokens,
    unversioned,
    workers,
)

router = APIRouter()
modules = (
    streams,
    runs,
    sweeps,
    comparison,
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
