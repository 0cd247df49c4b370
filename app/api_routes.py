"""Routes of the JSON API, which covers everything that the pages show and do."""

from fastapi import APIRouter
from starlette.routing import Match
from starlette.types import Scope

from app.alerts import alerts_api
from app.artifacts import artifacts_api
from app.auth import audit_api, secrets_api, tokens_api, users_api
from app.checks import checks_api
from app.compare import comparison_api, notes_api, shared_links_api
from app.files import image_uploads, ingest_api, json_lines_api, weight_uploads_api
from app.http import openapi_docs
from app.live import streams_api
from app.projects import projects_api
from app.reports import reports_api
from app.runs import (
    autocomplete_api,
    bulk_api,
    chart_preferences_api,
    grouping_api,
    runs_api,
    views_api,
)
from app.submission import estimates_api, presets_api
from app.sweeps import agents_api, sweeps_api
from app.telemetry import (
    diagnosis_api,
    environment_api,
    export_api,
    precision_plans_api,
    series_api,
    system_api,
)
from app.trash import retention_api, storage_api, trash_api
from app.workers import workers_api


class _Api(APIRouter):
    """Router that skips paths of pages, since matching a hundred patterns takes noticeable time."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request against the routes, if its path is below /api/."""
        return super().matches(scope) if scope["path"].startswith("/api/") else (Match.NONE, {})


router = _Api()
modules = (
    streams_api,
    autocomplete_api,
    grouping_api,
    runs_api,
    estimates_api,
    bulk_api,
    trash_api,
    agents_api,
    sweeps_api,
    comparison_api,
    views_api,
    chart_preferences_api,
    presets_api,
    notes_api,
    reports_api,
    checks_api,
    series_api,
    system_api,
    diagnosis_api,
    precision_plans_api,
    environment_api,
    export_api,
    ingest_api,
    json_lines_api,
    weight_uploads_api,
    artifacts_api,
    image_uploads,
    workers_api,
    storage_api,
    tokens_api,
    secrets_api,
    users_api,
    projects_api,
    retention_api,
    audit_api,
    shared_links_api,
    alerts_api,
    openapi_docs,
)
for module in modules:
    router.include_router(module.router)
