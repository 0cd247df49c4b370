"""The base of all tables."""

from typing import Any, ClassVar

from sqlalchemy import JSON, Dialect, Double, ForeignKey, MetaData, Text, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

#: Largest values of id columns and of counters; counters leave room for additions.
LARGEST_ID = 2**31 - 1
LARGEST_COUNT = 2**62


class CleanText(TypeDecorator[str]):
    """Text column that replaces characters that PostgreSQL or UTF-8 cannot store.

    These are zero bytes (PostgreSQL) and lone surrogates (UTF-8).
    """

    impl = Text
    cache_ok = True

    @property
    def python_type(self) -> type[str]:
        """Python type of the values, used by exports."""
        return str

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Clean a value before it is written."""
        return None if value is None else clean(value)


def clean(text: str) -> str:
    """Return a text with the characters replaced that a database cannot store."""
    whole = text.encode(errors="replace").decode()
    return whole.replace("\x00", "\N{REPLACEMENT CHARACTER}")


class Goal(CleanText):
    """Goal of a sweep; earlier versions stored `minimise` and `maximise`."""

    cache_ok = True

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """Return the spelling of today."""
        return value and value.replace("mise", "mize")


class Table(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: CleanText,
        float: Double,
        dict[str, Any]: JSON,
        list[dict[str, Any]]: JSON,
        list[int]: JSON,
        list[str]: JSON,
    }


class OfProject:
    """A row of a project: `db.access.permissions` hides it from users without a role in it."""

    project: Mapped[str] = mapped_column()


class OfRun:
    """A row that belongs to a run: `db.access.permissions` shows it to those who see the run."""

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
