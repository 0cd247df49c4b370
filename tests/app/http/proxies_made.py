"""Shared helpers of the tests of proxies."""

import datetime
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.site import until

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")


#: As docs/how-to/operations.md has it, and what makes of it a server of a test's own.
CONFIGURATION = """
daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
{location}
  }}
}}
"""


@contextmanager
def nginx(folder: Path, port: int, upstream: str, *, block: int = 0) -> Iterator[str]:
    """Run nginx with one of the configurations of docs/how-to/operations.md; yield its address."""
    folder.mkdir(mode=0o755)
    _certify(folder)
    documented = (Path(__file__).parents[3] / "docs" / "how-to" / "operations.md").read_text()
    location = documented.split("```nginx\n")[block + 1].partition("```")[0]
    assert "proxy_pass" in location
    text = CONFIGURATION.format(folder=folder, port=port, location=location)
    (folder / "nginx.conf").write_text(text.replace("http://127.0.0.1:8000", upstream))
    command = [str(NGINX), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]
    process = subprocess.Popen(command)
    try:
        until(lambda: _listens(port))
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _certify(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    kind = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *kind))
