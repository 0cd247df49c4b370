"""Routes of the JSON API, which covers everything that the pages show and do."""

from fastapi import APIRouter
from starlette.routing import Match
from starlette.types import Scope

from app.alerts import alerts_api
from app.artifacts import artifacts_api
from app.auth import account_routes, audit_routes, secrets_routes, users_routes
from app.checks import checks_routes
from app.compare import comparison_api, notes_api, shared_links_api
from app.files import downloads, image_uploads, ingest_api, json_lines_api, weight_uploads_api
from app.http import openapi_docs
from app.live import streams_api
from app.projects import projects_routes
from app.reports import reports_api
from app.runs import (
    autocomplete_api,
    bulk_api,
    chart_preferences_api,
    grouping_api,
    runs_api,
    views_api,
)
from app.submission import estimates_api, presets_routes
from app.sweeps import agents_api, sweeps_api
from app.telemetry import (
    damage_api,
    diagnosis_api,
    environment_api,
    export_api,
    precision_plans_api,
    series_api,
    system_api,
)
from app.trash import retention_routes, storage_api, trash_routes
from app.workers import workers_routes


class _Api(APIRouter):
    """Router that skips paths of pages, since matching a hundred patterns takes noticeable time."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request against the routes, if its path is below /api/."""
        return super().matches(scope) if scope["path"].startswith("/api/") else (Match.NONE, {})


router = _Api()
routers = (
    streams_api.router,
    autocomplete_api.router,
    grouping_api.router,
    runs_api.router,
    estimates_api.router,
    bulk_api.router,
    trash_routes.api,
    agents_api.router,
    sweeps_api.router,
    comparison_api.router,
    views_api.router,
    chart_preferences_api.router,
    presets_routes.api,
    notes_api.router,
    reports_api.router,
    checks_routes.api,
    series_api.router,
    system_api.router,
    downloads.router,
    damage_api.router,
    diagnosis_api.router,
    precision_plans_api.router,
    environment_api.router,
    export_api.router,
    ingest_api.router,
    json_lines_api.router,
    weight_uploads_api.router,
    artifacts_api.router,
    image_uploads.router,
    workers_routes.api,
    storage_api.router,
    account_routes.api,
    secrets_routes.api,
    users_routes.api,
    projects_routes.api,
    retention_routes.api,
    audit_routes.api,
    shared_links_api.router,
    alerts_api.router,
    openapi_docs.router,
)
for part in routers:
    router.include_router(part)
