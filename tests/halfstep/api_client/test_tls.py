"""TLS connections of the API client."""

import datetime
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from halfstep import ApiError, Client
from halfstep.api_client.credentials import Credentials
from halfstep.telemetry.ingest import Ingest


class Projects(BaseHTTPRequestHandler):
    """A handler that responds with an empty list of projects."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for this machine, and its key, in a file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = tmp_path / "certificate.pem"
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture
def https(certificate: Path) -> Iterator[str]:
    """The address of a server with this certificate."""
    server = HTTPServer(("127.0.0.1", 0), Projects)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_certificate_that_nobody_signed_is_rejected(https: str) -> None:
    """A self-signed certificate is rejected by API calls and uploads, as by a plain HTTP client."""
    with Client(https, "token") as client, pytest.raises(ApiError, match="certificate verify"):
        client.projects()
    refused = pytest.raises(ApiError, match="certificate verify")
    with Ingest(Credentials(https, "token")) as ingest, refused:
        ingest.open({})


def test_a_certificate_of_the_environment_is_accepted(
    https: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A self-signed certificate in SSL_CERT_FILE is accepted."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Client(https, "token") as client:
        assert client.projects() == []
        assert client.projects() == []
