"""The JSON API: all that the pages show and do, for scripts."""

from fastapi import APIRouter

from app.api import (
    alerts,
    bulk,
    comparison,
    deeds,
    diagnosis,
    docs,
    environment,
    estimates,
    export,
    grouping,
    ingest,
    links,
    people,
    projects,
    run_bin,
    runs,
    secrets,
    series,
    storage,
    streams,
    sweeps,
    system,
    tokens,
    unversioned,
    uploads,
    views,
    vocabulary,
    workers,
)

router = APIRouter()
modules = (
    streams,
    vocabulary,
    grouping,
    runs,
    estimates,
    bulk,
    run_bin,
    sweeps,
    comparison,
    views,
    series,
    system,
    diagnosis,
    environment,
    export,
    ingest,
    uploads,
    workers,
    storage,
    tokens,
    secrets,
    people,
    projects,
    deeds,
    links,
    alerts,
    docs,
)
for module in modules:
    router.include_router(module.router, prefix="/api/v1")
router.include_router(unversioned.router)
