"""Groups of runs and their members."""

import pytest

from db.database import Database
from db.errors import NotFound
from db.runs import groups
from db.tables import User
from tests.db.conftest import config, submit


def test_variant_names_a_missing_scaler() -> None:
    """fp16 without a scaler is a variant; in other precisions the scaler does not matter.

    TF32 is a variant of fp32 only.
    """
    assert groups.variant(config()) == "fp16"
    assert groups.variant(config() | {"scaler": {"enabled": False}}) == "fp16 without scaler"
    assert groups.variant(config(precision="bf16") | {"scaler": {"enabled": False}}) == "bf16"
    assert groups.variant(config(precision="fp32", tf32=True)) == "TF32"
    assert groups.variant(config(precision="fp16", tf32=True)) == "fp16"


def test_members_are_ordered_as_queued(database: Database, ada: User) -> None:
    """A group's members are in order of submission; without runs it does not exist."""
    with database.writing() as session:
        first, second, _other = (submit(session, ada) for _ in range(3))
        first.group_id = second.group_id = first.id
    with database.reading() as session:
        found = groups.members(session, first.id)
        assert [(run.id, owner) for run, owner in found] == [(1, "ada"), (2, "ada")]
        with pytest.raises(NotFound):
            groups.members(session, 3)
