"""Uploads of a report with the sources that its rows name. This module imports torch."""

import json
import os
import tempfile
from pathlib import Path

from halfstep.api_client.credentials import Credentials
from halfstep.check.report import (
    MOST_BYTES,
    MOST_FILES,
    MOST_LINES,
    Report,
    as_content,
    as_json,
)
from halfstep.client import Client
from halfstep.shadow.source_files import is_of_script
from halfstep.telemetry.plain_json import clean, plain


def upload(report: Report, login: Credentials, project: str) -> tuple[str, list[str]]:
    """Upload a report; return the address of its page, and the files that are too large for it.

    Raises ApiError.
    """
    sources, left_out = sources_of(report)
    with Client(login.url, login.token) as client:
        row = client.upload_check(plain(as_content(report)), sources, project=project)
        return client.url_of(f"/checks/{row['id']}"), left_out


def sources_of(report: Report) -> tuple[dict[str, str], list[str]]:
    """Return the texts of the script's own files that rows name, and those that are left out.

    Files are left out once all together exceed the limits of an upload.
    """
    sources: dict[str, str] = {}
    left_out = []
    bytes_left, lines_left = MOST_BYTES - len(_encode(plain(as_content(report)))), MOST_LINES
    for file in dict.fromkeys(row.file for row in report.rows if row.line):
        if not is_of_script(str(Path(file).absolute())):
            continue
        try:
            text = clean(Path(file).read_text(encoding="utf-8", errors="replace"))
        except OSError:  # generated code
            continue
        size, lines = len(_encode({file: text})), text.count("\n") + 1
        if size > bytes_left or lines > lines_left or len(sources) == MOST_FILES:
            left_out.append(file)
            continue
        sources[clean(file)] = text
        bytes_left, lines_left = bytes_left - size, lines_left - lines
    return sources, left_out


def save(report: Report) -> Path:
    """Write a report to a new file in the working directory, or else in that for temporary files.

    Raises OSError.
    """
    try:
        return _save(report, str(Path.cwd()))
    except OSError:
        return _save(report, None)


def _save(report: Report, folder: str | None) -> Path:
    descriptor, path = tempfile.mkstemp(".json", "halfstep-check-", folder)
    with os.fdopen(descriptor, "w") as file:
        file.write(as_json(report))
    return Path(path)


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
