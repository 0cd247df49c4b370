"""Reports with their images and links; how users have arranged their charts."""

import sqlalchemy as sa
from alembic import op

revision = '0042'
down_revision = '0041'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'reports',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('project', sa.Text(), nullable=False),
        sa.Column('title', sa.Text(), nullable=False),
        sa.Column('text', sa.Text(), nullable=False),
        sa.Column('panels', sa.JSON(), nullable=False),
        sa.Column('version', sa.Integer(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('created_at', sa.Double(), nullable=False),
        sa.Column('editor_id', sa.Integer(), nullable=False),
        sa.Column('changed_at', sa.Double(), nullable=False),
        sa.Column('deleted_at', sa.Double()),
        sa.Column('erasing', sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(['project'], ['projects.name'], name='fk_reports_project'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_reports_user_id'),
        sa.ForeignKeyConstraint(['editor_id'], ['users.id'], name='fk_reports_editor_id'),
        sa.PrimaryKeyConstraint('id', name='pk_reports'),
    )
    op.create_index('ix_reports_project', 'reports', ['project'])
    op.create_table(
        'report_images',
        sa.Column('id', sa.Integer(), nullable=False),
        sa.Column('report_id', sa.Integer(), nullable=False),
        sa.Column('sha256', sa.Text(), nullable=False),
        sa.Column('media_type', sa.Text(), nullable=False),
        sa.Column('size_bytes', sa.Integer(), nullable=False),
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('uploaded_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['report_id'], ['reports.id'], name='fk_report_images_report_id'),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_report_images_user_id'),
        sa.PrimaryKeyConstraint('id', name='pk_report_images'),
        sa.UniqueConstraint('report_id', 'sha256', name='uq_report_images_report_id_sha256'),
    )
    op.create_table(
        'chart_preferences',
        sa.Column('user_id', sa.Integer(), nullable=False),
        sa.Column('scope', sa.Text(), nullable=False),
        sa.Column('content', sa.JSON(), nullable=False),
        sa.Column('changed_at', sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name='fk_chart_preferences_user_id'),
        sa.PrimaryKeyConstraint('user_id', 'scope', name='pk_chart_preferences'),
    )
    with op.batch_alter_table('shared_links') as links:
        links.add_column(sa.Column('report_id', sa.Integer()))
        links.create_foreign_key('fk_shared_links_report_id', 'reports', ['report_id'], ['id'])


def downgrade() -> None:
    # A link to a report becomes one to no run, which shows nothing.
    with op.batch_alter_table('shared_links') as links:
        links.drop_constraint('fk_shared_links_report_id', type_='foreignkey')
        links.drop_column('report_id')
    for table in ('chart_preferences', 'report_images', 'reports'):
        op.drop_table(table)
