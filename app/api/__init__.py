"""The JSON API: all that the pages show and do, for scripts."""

from fastapi import APIRouter
from starlette.routing import Match
from starlette.types import Scope

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
    notes,
    people,
    presets,
    projects,
    retention,
    run_bin,
    runs,
    secrets,
    series,
    storage,
    streams,
    sweeps,
    system,
    tokens,
    uploads,
    views,
    vocabulary,
    workers,
)


class _Api(APIRouter):
    """Looks at no address of a page: a hundred patterns are a noticeable part of a short answer."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Tell whether one of its routes matches."""
        return super().matches(scope) if scope["path"].startswith("/api/") else (Match.NONE, {})


router = _Api()
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
    presets,
    notes,
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
    retention,
    deeds,
    links,
    alerts,
    docs,
)
for module in modules:
    router.include_router(module.router, prefix="/api/v1")
