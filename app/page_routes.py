"""Routes of the HTML pages."""

from fastapi import APIRouter

from app.alerts import alerts_pages
from app.artifacts import artifacts_pages
from app.auth import account_pages, audit_pages, secrets_pages, sign_in_pages, users_pages
from app.checks import checks_pages
from app.compare import comparison_pages, notes_pages, shared_links_pages, shared_pages
from app.html import chart_pages, document_pages
from app.http import health_pages
from app.projects import projects_pages
from app.reports import reports_pages
from app.runs import list_pages, run_control_pages, run_pages, views_pages
from app.submission import new_command_pages, new_run_pages, presets_pages, recipe_pages
from app.sweeps import sweeps_pages
from app.telemetry import precision_plans_pages
from app.trash import retention_pages, storage_pages, trash_pages
from app.workers import workers_pages

router = APIRouter(include_in_schema=False)
for module in (
    health_pages,
    sign_in_pages,
    list_pages,
    new_run_pages,
    new_command_pages,
    presets_pages,
    run_control_pages,
    run_pages,
    precision_plans_pages,
    trash_pages,
    comparison_pages,
    chart_pages,
    notes_pages,
    artifacts_pages,
    reports_pages,
    checks_pages,
    sweeps_pages,
    workers_pages,
    recipe_pages,
    secrets_pages,
    alerts_pages,
    views_pages,
    account_pages,
    users_pages,
    projects_pages,
    retention_pages,
    storage_pages,
    audit_pages,
    shared_links_pages,
    shared_pages,
    document_pages,
):
    router.include_router(module.router)
