"""The JSON API: all that the pages show and do, for scripts."""

from fastapi import APIRouter

from app.api import (
    diagnosis,
    docs,
    export,
    groups,
    runs,
    series,
    streams,
    system,
    tokens,
    unversioned,
    workers,
)

router = APIRouter()
for module in (streams, runs, groups, series, system, diagnosis, export, workers, tokens, docs):
    router.include_router(module.router, prefix="/api/v1")
router.include_router(unversioned.router)
