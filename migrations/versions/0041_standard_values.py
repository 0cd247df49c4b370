"""Values that rows hold get the field's names: settings, words of views and alerts."""

from alembic import op

from migrations import values

revision = '0041'
down_revision = '0040'
branch_labels = None
depends_on = None

SETTINGS = {'look_every_steps': 'check_every_steps'}  # of spike
CHOICES = {'go on': 'continue'}  # of spike.afterwards
COLUMNS = {'verdict': 'health'}  # of the list of runs
OUTCOMES = {'unapplied': 'no_updates'}
#: Of diagnoses of the kind `weights`.
FIELDS = {'misshapen': 'mismatched', 'misshapen_count': 'mismatched_count'}


def rename(
    settings: dict[str, str],
    choices: dict[str, str],
    columns: dict[str, str],
    outcomes: dict[str, str],
    fields: dict[str, str],
) -> None:
    values.rename_spike(settings, choices)
    values.rename_in_views({}, columns, outcomes)
    values.rename_in_diagnoses({'weights': fields})
    for table in ('alert_rules', 'alerts'):
        for old, new in outcomes.items():
            op.execute(f"UPDATE {table} SET condition = '{new}' WHERE condition = '{old}'")


def upgrade() -> None:
    rename(SETTINGS, CHOICES, COLUMNS, OUTCOMES, FIELDS)


def downgrade() -> None:
    rename(*map(values.inverse, (SETTINGS, CHOICES, COLUMNS, OUTCOMES, FIELDS)))
