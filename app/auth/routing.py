"""Routes that require a permission: each names it after its path, and so signs the user in."""

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

from fastapi import APIRouter, Depends

from app.auth.authentication import AtBrowser, SignedIn, Uploader, require_sign_in
from app.auth.permissions import requires
from app.html.rendering import Context

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

#: Parameters that check what a route requires; their order among others is that of the route.
CHECKING = (SignedIn, AtBrowser, Uploader, Context)


def _declare(method: str) -> Callable[..., Callable[[Endpoint], Endpoint]]:
    def declare(
        router: APIRouter, path: str, need: str, **options: Any
    ) -> Callable[[Endpoint], Endpoint]:
        names = {"token_permission", "lasts", "for_uploads"} & options.keys()
        rules = {name: options.pop(name) for name in names}

        def register(endpoint: Endpoint) -> Endpoint:
            parameters = signature(endpoint).parameters.values()
            if not any(parameter.annotation in CHECKING for parameter in parameters):
                options["dependencies"] = [Depends(require_sign_in)]
            endpoint = requires(need, **rules)(endpoint)
            register_route = getattr(APIRouter, method)(router, path, **options)
            registered: Endpoint = register_route(endpoint)
            return registered

        return register

    return declare


class Router(APIRouter):
    """A router whose routes declare what they require: `@router.get("/runs", SIGNED_IN)`.

    Further arguments are those of `requires`, and of FastAPI.
    """

    get = _declare("get")
    post = _declare("post")
    put = _declare("put")
    patch = _declare("patch")
    delete = _declare("delete")
