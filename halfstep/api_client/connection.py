"""Connection to one server: requests, pages of rows, and downloads."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import Any, Literal, Self

import httpx2

from halfstep.api_client import credentials, local_server
from halfstep.api_client.errors import ApiError
from halfstep.api_client.responses import check_body, content, error_of, naming, spoken
from halfstep.api_client.tls import DeferredContext

PATIENCE_SECONDS = 30.0  # timeout of a request
MOST_RUNS = 200  # the server's limit per page


class Connection:
    """Connection to one server as one user; as a context manager it closes on exit."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        """Open the connection. Raises ApiError without a token.

        url: by default HALFSTEP_URL, that of `halfstep login`, or of the server on this machine.
        token: by default HALFSTEP_TOKEN, or that of `halfstep login`; created on the account page.
        """
        usual = local_server.default_url()
        login = credentials.find(url, token, otherwise=usual)
        if login is None:
            url = (url or os.environ.get("HALFSTEP_URL") or usual).rstrip("/")
            advice = f"run `halfstep login {url}` or set HALFSTEP_TOKEN"
            raise ApiError(0, f"no API token: create one at {url}/account, then {advice}")
        self._http = httpx2.Client(
            base_url=login.url,
            headers={"Authorization": f"Bearer {login.token}"},
            timeout=PATIENCE_SECONDS,
            follow_redirects=True,
            verify=DeferredContext(),
            event_hooks=naming(login.origin),
            trust_env=not credentials.is_local(login.url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def page_url(self, run_id: int) -> str:
        """Return the address of a run's page."""
        return self.url_of(f"/runs/{run_id}")

    def url_of(self, path: str) -> str:
        """Return the whole address of a path on the server."""
        return f"{str(self._http.base_url).rstrip('/')}{path}"

    def _fetch(self, path: str, partial: Path, on_progress: Callable[[int], None]) -> str:
        """Fetch the missing rest of a partial file; return its name on the server."""
        had = partial.stat().st_size if partial.exists() else 0
        headers = {"Range": f"bytes={had}-"} if had else {}
        with self._stream(path, headers) as answer:
            if answer.status_code == 416:  # it is complete
                return _name(self._http.head(path))
            with partial.open("ab" if answer.status_code == 206 else "wb") as file:
                for chunk in answer.iter_raw():
                    file.write(chunk)
                    on_progress(file.tell())
            return _name(answer)

    def _pages(
        self,
        path: str,
        name: str,
        query: Mapping[str, Any] | None = None,
        *,
        cursor: Literal["after", "before"] = "after",
    ) -> Iterator[Any]:
        """Yield the rows of all pages. cursor: parameter that has a page's `next`."""
        query = dict(query or {})
        while True:
            page = self._get(path, query)
            yield from page[name]
            if page["next"] is None:
                return
            query[cursor] = page["next"]

    @contextmanager
    def _stream(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx2.Response]:
        """Open a response whose body is read in pieces. Raises ApiError."""
        with spoken(), self._http.stream("GET", path, headers=headers) as answer:
            if answer.is_error and answer.status_code != 416:
                answer.read()
                raise error_of(answer)
            yield answer

    def _get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        with spoken():
            return content(self._http.get(path, params=query))

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._send("POST", path, body)

    def _put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._send("PUT", path, body)

    def _patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._send("PATCH", path, body)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """Send a request whose response is an object."""
        check_body(body)
        with spoken():
            return dict(content(self._http.request(method, path, json=body)))

    def _post_only(self, path: str, body: Mapping[str, Any]) -> None:
        """Send a request whose response is empty."""
        check_body(body)
        with spoken():
            answer = self._http.post(path, json=body)
        if answer.is_error:
            raise error_of(answer)

    def _delete(self, path: str, query: Mapping[str, Any] | None = None) -> None:
        with spoken():
            answer = self._http.delete(path, params=query)
        if answer.is_error:
            raise error_of(answer)


def page_size(limit: int | None) -> int:
    """Return the number of rows of a page to request. Raises ApiError."""
    if limit is not None and limit < 1:
        raise ApiError(422, f"limit: {limit} is not valid; allowed: a whole number from 1")
    return MOST_RUNS if limit is None else min(limit, MOST_RUNS)


def _name(answer: httpx2.Response) -> str:
    """Return a download's file name, without any folder in it."""
    message = Message()
    headers = [one.headers.get("content-disposition") for one in (answer, *answer.history)]
    message["content-disposition"] = next(filter(None, headers), "")  # a bucket's answer has none
    return Path(message.get_filename("checkpoint.pt")).name
