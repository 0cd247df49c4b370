"""The ASGI application."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from anyio import CapacityLimiter
from fastapi import APIRouter, FastAPI

from app import api_routes, page_routes
from app.auth.sso import Provider
from app.dependencies import (
    ENCODING,
    HASHING,
    INGESTING,
    MOST_ENCODING,
    MOST_HASHING,
    TURNS,
)
from app.files import downloads, image_downloads
from app.http import assets, http_errors, monitoring_metrics
from app.http.active_requests import ActiveRequests, ActiveRequestsMiddleware, Queue
from app.http.compression import Compact
from app.http.damage_header import DamageHeader
from app.http.path_prefix import PathPrefix
from app.http.rate_limit import RateLimit
from app.http.request_metrics import RequestMetrics, RequestMetricsMiddleware
from app.http.security_headers import BodyLimit, Heads, KnownHosts, SecurityHeaders
from app.live.live import Live
from app.live.run_states import RunStates
from db.database import Database
from db.settings import Settings

#: FastAPI builds a route at its first request and caches it here: the applications of a process,
#: of which the tests start thousands, share that.
ROUTES = APIRouter()
#: As before version 1 of the API; the same routes below /api/v1 are documented.
ROUTES.include_router(downloads.router, include_in_schema=False)
ROUTES.include_router(image_downloads.router)
ROUTES.include_router(api_routes.router, prefix="/api/v1")
ROUTES.include_router(assets.router)
ROUTES.include_router(monitoring_metrics.router)
# Without a prefix FastAPI would build each of these routes to verify that it has a path.
ROUTES.routes.extend(page_routes.router.routes)


def create_app(settings: Settings, database: Database) -> FastAPI:
    """Return the application. The database must be migrated."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        app.state.live.close()
        app.state.ingesting.shutdown()

    app = FastAPI(
        title="Halfstep",
        description="Self-hosted mixed-precision training.",
        lifespan=lifespan,
        routes=ROUTES.routes,
        # The API description requires a sign-in, too, and its page loads nothing from other hosts.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.settings = settings
    app.state.database = database
    app.state.turns = asyncio.Semaphore(TURNS)
    app.state.ingesting = ThreadPoolExecutor(INGESTING, thread_name_prefix="ingest")
    app.state.hashing = Queue(HASHING, MOST_HASHING, "passwords are verified")
    app.state.encoding = Queue(ENCODING, MOST_ENCODING, "images are encoded")
    # A check that timed out continues in its thread until the database answers.
    app.state.readiness_checks = CapacityLimiter(2)
    app.state.noting = set()
    app.state.log_lines = RateLimit(settings.log_lines_per_minute, "JSON lines")
    app.state.sso = Provider(settings) if settings.oidc_issuer else None
    app.state.live = Live()
    app.state.run_states = RunStates(database)
    app.state.active_requests = ActiveRequests(database)
    app.state.request_metrics = RequestMetrics()
    app.state.assets = assets.Assets(settings.path_prefix)
    app.state.shown_folder = None  # the Mirror of `halfstep show`: its runs can only be viewed
    app.add_middleware(http_errors.Failures)
    app.add_middleware(DamageHeader)
    app.add_middleware(Compact)
    app.add_middleware(BodyLimit)
    app.add_middleware(ActiveRequestsMiddleware, active_requests=app.state.active_requests)
    app.add_middleware(Heads)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(KnownHosts, settings=settings)
    app.add_middleware(RequestMetricsMiddleware, metrics=app.state.request_metrics)
    app.add_middleware(PathPrefix, prefix=settings.path_prefix)
    http_errors.install(app)
    return app
