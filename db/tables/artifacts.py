"""Tables of named artifacts: collections, versions, their files and who made or used them."""

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.clock import now
from db.tables.base import OfProject, OfRun, Table

#: Role of a run in a version's lineage.
MADE, USED = "made", "used"


class ArtifactCollection(OfProject, Table):
    """A named artifact of a project: all of its versions."""

    __tablename__ = "artifact_collections"
    __table_args__ = (UniqueConstraint("project", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str]
    name: Mapped[str]
    type: Mapped[str]  # of the first version, such as dataset or model
    next_number: Mapped[int] = mapped_column(default=0)  # of its next version; never reused
    created_at: Mapped[float] = mapped_column(default=now())


class ArtifactVersion(Table):
    """A version of an artifact. Its row stays when it is deleted; its files do not."""

    __tablename__ = "artifact_versions"
    __table_args__ = (UniqueConstraint("collection_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    collection_id: Mapped[int] = mapped_column(ForeignKey("artifact_collections.id"))
    number: Mapped[int]  # 0, 1, …: v0, v1, …
    digest: Mapped[str] = mapped_column(index=True)  # see halfstep.artifacts.manifest
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    files: Mapped[int]
    is_file: Mapped[bool]  # one file, saved by its path; else a folder
    new_aliases: Mapped[list[str]]  # which it gets when it is complete
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    created_at: Mapped[float] = mapped_column(default=now())
    completed_at: Mapped[float | None]  # all files are stored since then
    deleted_at: Mapped[float | None]


class ArtifactAlias(Table):
    """A name for one version of an artifact, such as latest or best."""

    __tablename__ = "artifact_aliases"
    __table_args__ = ({"sqlite_with_rowid": False},)

    collection_id: Mapped[int] = mapped_column(
        ForeignKey("artifact_collections.id"), primary_key=True
    )
    alias: Mapped[str] = mapped_column(primary_key=True)
    version_id: Mapped[int] = mapped_column(ForeignKey("artifact_versions.id"), index=True)


class Blob(Table):
    """Stored content, which all files of artifacts with this SHA-256 share."""

    __tablename__ = "blobs"
    __table_args__ = (UniqueConstraint("sha256", "size_bytes"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    key: Mapped[str]  # in the store, new for each row

    path: None = None  # as of other stored files: on no training machine

    @property
    def is_stored(self) -> bool:
        """Whether it can be downloaded."""
        return True

    @property
    def stored_bytes(self) -> int:
        """Bytes that it uses in the store."""
        return self.size_bytes


class ArtifactEntry(Table):
    """A file of a version. Without a blob it is not uploaded yet.

    The foreign key keeps a blob that a version refers to from being deleted.
    """

    __tablename__ = "artifact_entries"
    __table_args__ = (
        Index("ix_artifact_entries_blob_id", "blob_id"),
        {"sqlite_with_rowid": False},
    )

    version_id: Mapped[int] = mapped_column(ForeignKey("artifact_versions.id"), primary_key=True)
    path: Mapped[str] = mapped_column(primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    blob_id: Mapped[int | None] = mapped_column(ForeignKey("blobs.id"))


class ArtifactLink(OfRun, Table):
    """A run that made or used a version."""

    __tablename__ = "artifact_links"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    version_id: Mapped[int] = mapped_column(
        ForeignKey("artifact_versions.id"), primary_key=True, index=True
    )
    role: Mapped[str] = mapped_column(primary_key=True)  # made or used
    created_at: Mapped[float] = mapped_column(default=now())
