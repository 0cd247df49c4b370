"""Shared helpers of the tests of weight uploads api."""

from typing import Any

from db.database import Database
from db.queue import workers
from halfstep.config_groups import Weights
from tests.app.conftest import CPU, DIGITS, SCHEMA


def offer_weights(database: Database) -> None:
    weights = Weights.model_json_schema() | {"title": "Initial weights"}
    schema = SCHEMA | {"properties": SCHEMA["properties"] | {"weights": weights}}
    offer: dict[str, Any] = {"devices": [CPU], "recipes": [DIGITS | {"schema": schema}]}
    with database.writing() as session:
        workers.register(session, name="w1", host="h", pid=1, versions={}, **offer)
