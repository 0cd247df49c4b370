"""A checkpoint of 3 GiB, downloaded over a connection that is cut five times.

    python -m benchmarks.cut_download [--gib 3.0]

`curl -C -` asks for the rest each time. A proxy between it and the server ends each connection
after its share of the bytes. The file must be whole by its SHA-256, and little may be sent twice.
"""

import argparse
import hashlib
import os
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.report import report
from benchmarks.site import Site, serving
from db.files import checkpoints
from tests.spool_made import checkpoint_of

CUTS = 5
PIECE_BYTES = 2**20
BAR = 1.01  # of the file's size, sent in all
PARTIAL_FILE = 18  # curl's exit code for a connection that ended too early


class CuttingProxy(threading.Thread):
    """A proxy whose first connections end after a number of bytes."""

    def __init__(self, address: str, most_bytes: int) -> None:
        super().__init__(daemon=True)
        host, _, port = address.removeprefix("http://").partition(":")
        self._target, self._most_bytes = (host, int(port)), most_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = self.sent_bytes = 0

    def run(self) -> None:
        """Serve one connection at a time, as curl opens only one."""
        while True:
            client, _ = self._listener.accept()
            with client, socket.create_connection(self._target) as server:
                threading.Thread(target=_pass_on, args=(client, server), daemon=True).start()
                left = self._most_bytes if self.cuts < CUTS else None
                while piece := server.recv(PIECE_BYTES):
                    piece = piece if left is None else piece[:left]
                    client.sendall(piece)
                    self.sent_bytes += len(piece)
                    if left is not None and (left := left - len(piece)) == 0:
                        self.cuts += 1
                        break
                # Only closing it would wait for the thread that reads from it.
                client.shutdown(socket.SHUT_RDWR)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(PIECE_BYTES):
            target.sendall(piece)
    except OSError:
        pass  # the connection was cut


def publish(site: Site, size_bytes: int) -> str:
    """Save a checkpoint of random bytes for run 1; return its SHA-256."""
    path = site.settings.run_folder(1) / "checkpoints" / "step-00000001.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for begin in range(0, size_bytes, PIECE_BYTES):
            piece = os.urandom(min(PIECE_BYTES, size_bytes - begin))
            digest.update(piece)
            file.write(piece)
    saved = {
        "kind": "checkpoint",
        "path": "",
        "size_bytes": size_bytes,
        "sha256": digest.hexdigest(),
    }
    event: dict[str, Any] = {"step": 1, "reason": "end", "request": None, "files": [saved]}
    with site.database.writing() as session:
        key = path.relative_to(site.settings.data).as_posix()
        checkpoints.publish(session, 1, 1, checkpoint_of(event), [key])
    return digest.hexdigest()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=3.0, help="of the checkpoint")
    size_bytes = int(parser.parse_known_args()[0].gib * 2**30)
    with serving(1) as site, tempfile.TemporaryDirectory(prefix="halfstep-bench-") as folder:
        sha256, target = publish(site, size_bytes), Path(folder) / "checkpoint.pt"
        proxy = CuttingProxy(site.address, size_bytes // (CUTS + 1))
        proxy.start()
        command = ["curl", "--silent", "--fail", "-C", "-", "-o", str(target)]
        command += ["-H", f"Authorization: Bearer {site.token()}"]
        command += [f"{proxy.address}/runs/1/checkpoints/1/download"]
        begun, tries = time.perf_counter(), 1
        while (code := subprocess.run(command).returncode) == PARTIAL_FILE:
            tries += 1
        seconds = time.perf_counter() - begun
        if code:
            raise SystemExit(f"curl ended with {code}")
        with target.open("rb") as file:
            is_whole = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    share = proxy.sent_bytes / size_bytes
    rows = [
        (
            f"{size_bytes / 2**20:,.0f}",
            proxy.cuts,
            tries,
            "yes" if is_whole else "NO",
            f"{share:.4f}",
            f"{size_bytes / 2**20 / seconds:,.0f}",
        )
    ]
    report(
        "cut_download",
        f"whole after {CUTS} cuts; sent ≤ {BAR:g} × its size",
        ("file, MiB", "cuts", "tries of curl", "whole", "sent, × size", "MiB/s"),
        rows,
        measured=f"{'whole' if is_whole else 'NOT WHOLE'}, {share:.4f} × its size",
        passed=is_whole and proxy.cuts == CUTS and share <= BAR,
    )


if __name__ == "__main__":
    main()
