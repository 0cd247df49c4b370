"""Named artifacts with their runs, leases of sweep agents, and more of a machine in its samples."""

import sqlalchemy as sa
from alembic import op

revision = '0043'
down_revision = '0042'
branch_labels = None
depends_on = None


SAMPLES = {
    'process_memory_bytes': sa.BigInteger,
    'disk_bytes_per_second': sa.Double,
    'network_bytes_per_second': sa.Double,
}


def upgrade() -> None:
    op.create_table(
        'artifact_collections',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('project', sa.Text(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('type', sa.Text(), nullable=False),
        sa.Column('next_number', sa.Integer(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_artifact_collections'),
        sa.UniqueConstraint('project', 'name', name='uq_artifact_collections_project_name'),
    )
    op.create_table(
        'artifact_versions',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('collection_id', sa.Integer(), nullable=False),
        sa.Column('number', sa.Integer(), nullable=False),
        sa.Column('digest', sa.Text(), nullable=False),
        sa.Column('size_bytes', sa.BigInteger(), nullable=False),
        sa.Column('files', sa.Integer(), nullable=False),
        sa.Column('is_file', sa.Boolean(), nullable=False),
        sa.Column('new_aliases', sa.JSON(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('completed_at', sa.Double()),
        sa.Column('deleted_at', sa.Double()),
        sa.ForeignKeyConstraint(
            ['collection_id'], ['artifact_collections.id'], name='fk_artifact_versions_collection_id'
        ),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_artifact_versions_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_artifact_versions'),
        sa.UniqueConstraint('collection_id', 'number', name='uq_artifact_versions_collection_id_number'),
    )
    op.create_index('ix_artifact_versions_digest', 'artifact_versions', ['digest'])
    op.create_table(
        'artifact_aliases',
        sa.Column('collection_id', sa.Integer(), nullable=False),
        sa.Column('alias', sa.Text(), nullable=False),
        sa.Column('version_id', sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ['collection_id'], ['artifact_collections.id'], name='fk_artifact_aliases_collection_id'
        ),
        sa.ForeignKeyConstraint(
            ['version_id'], ['artifact_versions.id'], name='fk_artifact_aliases_version_id'
        ),
        sa.PrimaryKeyConstraint('collection_id', 'alias', name='pk_artifact_aliases'),
        sqlite_with_rowid=False,
    )
    op.create_index('ix_artifact_aliases_version_id', 'artifact_aliases', ['version_id'])
    op.create_table(
        'blobs',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('sha256', sa.Text(), nullable=False),
        sa.Column('size_bytes', sa.BigInteger(), nullable=False),
        sa.Column('key', sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_blobs'),
        sa.UniqueConstraint('sha256', 'size_bytes', name='uq_blobs_sha256_size_bytes'),
    )
    op.create_table(
        'artifact_entries',
        sa.Column('version_id', sa.Integer(), nullable=False),
        sa.Column('path', sa.Text(), nullable=False),
        sa.Column('size_bytes', sa.BigInteger(), nullable=False),
        sa.Column('sha256', sa.Text(), nullable=False),
        sa.Column('blob_id', sa.Integer()),
        sa.ForeignKeyConstraint(
            ['version_id'], ['artifact_versions.id'], name='fk_artifact_entries_version_id'
        ),
        sa.ForeignKeyConstraint(['blob_id'], ['blobs.id'], name='fk_artifact_entries_blob_id'),
        sa.PrimaryKeyConstraint('version_id', 'path', name='pk_artifact_entries'),
        sqlite_with_rowid=False,
    )
    op.create_index('ix_artifact_entries_blob_id', 'artifact_entries', ['blob_id'])
    op.create_table(
        'artifact_links',
        sa.Column('run_id', sa.Integer(), nullable=False),
        sa.Column('version_id', sa.Integer(), nullable=False),
        sa.Column('role', sa.Text(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name='fk_artifact_links_run_id'),
        sa.ForeignKeyConstraint(
            ['version_id'], ['artifact_versions.id'], name='fk_artifact_links_version_id'
        ),
        sa.PrimaryKeyConstraint('run_id', 'version_id', 'role', name='pk_artifact_links'),
        sqlite_with_rowid=False,
    )
    op.create_index('ix_artifact_links_version_id', 'artifact_links', ['version_id'])
    op.add_column('trials', sa.Column('agent_id', sa.Text()))
    for name, kind in SAMPLES.items():
        op.add_column('system_samples', sa.Column(name, kind()))
    op.add_column('trials', sa.Column('lease_expires_at', sa.Double()))


TABLES = (
    'artifact_links',
    'artifact_entries',
    'blobs',
    'artifact_aliases',
    'artifact_versions',
    'artifact_collections',
)


def downgrade() -> None:
    for name in SAMPLES:
        op.drop_column('system_samples', name)
    for column in ('lease_expires_at', 'agent_id'):
        op.drop_column('trials', column)
    for table in TABLES:
        op.drop_table(table)
