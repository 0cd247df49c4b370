"""The client's types of responses, generated from the server's schemas."""

import runpy
from pathlib import Path

from halfstep.api_client import response_types

GENERATOR = Path(".ci/response_types.py")


def test_the_committed_types_are_current() -> None:
    """`make response-types` was run after the last change to a response schema."""
    assert response_types.__file__ is not None
    committed = Path(response_types.__file__).read_text(encoding="utf-8")
    assert runpy.run_path(str(GENERATOR))["source"]() == committed
