"""Values that rows hold get the field's names: keys of configurations, words of views and alerts."""

from alembic import op

revision = '0041'
down_revision = '0040'
branch_labels = None
depends_on = None

#: Keys in JSON.
KEYS = {'misshapen': 'mismatched', 'look_every_steps': 'check_every_steps'}
JSON = {'runs': 'config', 'presets': 'config', 'sweeps': 'config', 'diagnoses': 'content'}
COLUMNS = {'verdict': 'health'}  # of the list of runs
CHOICES = {'go on': 'continue'}  # of spike.afterwards
OUTCOMES = {'unapplied': 'no_updates'}


def replace(table: str, column: str, texts: dict[str, str], *, is_json: bool = False) -> None:
    """Replace texts in a column, row by row, in the database."""
    is_cast = is_json and op.get_context().dialect.name == 'postgresql'
    before = f'CAST({column} AS TEXT)' if is_cast else column
    after = before
    for old, new in texts.items():
        after = f"replace({after}, '{old}', '{new}')"
    condition = ' OR '.join(f"{before} LIKE '%{old}%'" for old in texts)
    value = f'CAST({after} AS JSON)' if is_cast else after
    op.execute(f'UPDATE {table} SET {column} = {value} WHERE {condition}')


def rename(
    keys: dict[str, str], columns: dict[str, str], choices: dict[str, str], outcomes: dict[str, str]
) -> None:
    quoted = {f'"{old}":': f'"{new}":' for old, new in keys.items()}
    for table, column in JSON.items():
        replace(table, column, quoted, is_json=True)
    chosen = {f'"afterwards": "{old}"': f'"afterwards": "{new}"' for old, new in choices.items()}
    for table in ('runs', 'presets', 'sweeps'):
        replace(table, 'config', chosen, is_json=True)
    replace(
        'sweeps', 'space', {f'"spike.{old}"': f'"spike.{new}"' for old, new in keys.items()}, is_json=True
    )
    for old, new in keys.items():
        op.execute(f"UPDATE run_config_values SET path = 'spike.{new}', name = '{new}' WHERE path = 'spike.{old}'")
    for old, new in choices.items():
        op.execute(
            f"UPDATE run_config_values SET text = '{new}' WHERE path = 'spike.afterwards' AND text = '{old}'"
        )
    for column in ('filter', 'sort', 'columns', '"group"'):
        replace('saved_views', column, keys)
    replace('saved_views', 'columns', columns)
    replace('saved_views', 'filter', {f'status:{old}': f'status:{new}' for old, new in outcomes.items()})
    for table in ('alert_rules', 'alerts'):
        for old, new in outcomes.items():
            op.execute(f"UPDATE {table} SET condition = '{new}' WHERE condition = '{old}'")


def upgrade() -> None:
    rename(KEYS, COLUMNS, CHOICES, OUTCOMES)


def downgrade() -> None:
    rename(*({new: old for old, new in names.items()} for names in (KEYS, COLUMNS, CHOICES, OUTCOMES)))
