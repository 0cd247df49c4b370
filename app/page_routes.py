"""Routes of the HTML pages."""

from fastapi import APIRouter

from app.alerts import alerts_pages
from app.artifacts import artifacts_pages
from app.auth import account_routes, audit_routes, secrets_routes, sign_in_pages, users_routes
from app.checks import checks_routes
from app.compare import comparison_pages, notes_pages, shared_links_pages, shared_pages
from app.html import chart_pages, document_pages
from app.http import health_pages
from app.projects import projects_routes
from app.reports import reports_pages
from app.runs import list_pages, run_control_pages, run_pages, views_pages
from app.submission import new_command_pages, new_run_pages, presets_routes, recipe_pages
from app.sweeps import sweeps_pages
from app.telemetry import precision_plans_pages
from app.trash import retention_routes, storage_pages, trash_routes
from app.workers import workers_routes

router = APIRouter(include_in_schema=False)
for part in (
    health_pages.router,
    sign_in_pages.router,
    list_pages.router,
    new_run_pages.router,
    new_command_pages.router,
    presets_routes.pages,
    run_control_pages.router,
    run_pages.router,
    precision_plans_pages.router,
    trash_routes.pages,
    comparison_pages.router,
    chart_pages.router,
    notes_pages.router,
    artifacts_pages.router,
    reports_pages.router,
    checks_routes.pages,
    sweeps_pages.router,
    workers_routes.pages,
    recipe_pages.router,
    secrets_routes.pages,
    alerts_pages.router,
    views_pages.router,
    account_routes.pages,
    users_routes.pages,
    projects_routes.pages,
    retention_routes.pages,
    storage_pages.router,
    audit_routes.pages,
    shared_links_pages.router,
    shared_pages.router,
    document_pages.router,
):
    router.include_router(part)
