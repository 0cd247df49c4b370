"""Names of users that 0039 and 0041 replaced as if they were the product's are restored.

Earlier versions of these two replaced texts wherever they stood. What a run's configuration was is
known by run_config_values, which kept the names; views are restored where a name that is replaced
exists no more, and the earlier one does.
"""

import re

import sqlalchemy as sa
from alembic import op

from migrations import values

revision = '0048'
down_revision = '0047'
branch_labels = None
depends_on = None

#: Earlier names by later ones.
KEYS = {
    'rollback': 'rewind',
    'max_rollbacks': 'most_rewinds',
    'rollbacks': 'rewinds',
    'rolled_back_to': 'rewound_to',
    'mismatched': 'misshapen',
    'check_every_steps': 'look_every_steps',
}
#: Of the key `afterwards`.
CHOICES = {'continue': 'go on'}
#: In views, where they replaced parts of words.
TEXTS = {
    'rollback': 'rewind',
    'rolled_back_to': 'rewound_to',
    'mismatched': 'misshapen',
    'check_every_steps': 'look_every_steps',
    'health': 'verdict',
}
COLUMN = 'health'
#: What 0039 made of most_rewinds, and should have.
HALF, WHOLE = 'most_rollbacks', 'max_rollbacks'


def upgrade() -> None:
    values.rename_trial_params(values.inverse(KEYS))
    values.rename_in_diagnoses({'weights': {'misshapen_count': 'mismatched_count'}})
    if not op.get_context().as_sql:
        restore_configurations()
        restore_views()


def downgrade() -> None:
    pass


def restore_configurations() -> None:
    """Restore keys in configurations of runs, of presets and sweeps by runs of their recipe."""
    likely = ' OR '.join(f"path LIKE '%{old}%'" for old in KEYS.values())
    rows = op.get_bind().execute(
        sa.text(
            'SELECT runs.id, runs.recipe, path, text FROM run_config_values '
            f"JOIN runs ON runs.id = run_id WHERE {likely} OR text = 'go on'"
        )
    )
    of_runs: dict[object, set[str]] = {}
    for run, recipe, path, text in rows:
        known = {path, f'{path}={text}'}
        known.update(path[: match.start()] for match in re.finditer(r'\.', path))
        for key in (run, recipe):
            of_runs.setdefault(key, set()).update(known)

    columns = {'id': sa.Integer, 'recipe': sa.Text, 'config': sa.JSON}
    values.rewrite('runs', columns, lambda row: {'config': restored(row.config, of_runs.get(row.id, set()))})
    for table in ('presets', 'sweeps'):
        values.rewrite(
            table,
            columns,
            lambda row: {'config': restored(row.config, of_runs.get(row.recipe, set()))} if row.recipe else {},
        )
    values.rewrite(
        'sweeps',
        {'id': sa.Integer, 'command': sa.JSON, 'config': sa.JSON},
        lambda row: {'config': restored(row.config, set((row.command or {}).get('parameters') or ()))},
    )


def restored(config: object, known: set[str], above: str = '') -> object:
    """Return a configuration with the earlier names that are known by their paths."""
    if not isinstance(config, dict) or not known:
        return config
    found = {}
    for name, value in config.items():
        earlier = KEYS.get(name, name)
        if earlier not in config and f'{above}{earlier}' in known and f'{above}{name}' not in known:
            name = earlier
        path = f'{above}{name}'
        if name == 'afterwards' and value in CHOICES and f'{path}={CHOICES[value]}' in known:
            value = CHOICES[value]
        found[name] = restored(value, known, f'{path}.')
    return found


def restore_views() -> None:
    """Restore words of saved views that are names of users."""
    connection = op.get_bind()
    known = {COLUMN, *connection.scalars(sa.text('SELECT name FROM projects'))}
    for column in ('name', 'path'):
        known.update(connection.scalars(sa.text(f'SELECT DISTINCT {column} FROM run_config_values')))
    known.update(connection.scalars(sa.text('SELECT DISTINCT name FROM latest_metrics')))
    for tags in connection.scalars(sa.text("SELECT DISTINCT tags FROM runs WHERE tags <> ''")):
        known.update(re.findall(r'[^,\s]+', tags))

    def word(match: re.Match[str]) -> str:
        later = match[0].removeprefix('-')
        earlier = later
        for new, old in TEXTS.items():
            earlier = earlier.replace(new, old)
        names = [later, later.replace(HALF, WHOLE), earlier]
        name = next((each for each in names if each in known), later)
        return match[0].replace(later, name)

    kinds = dict.fromkeys(('filter', 'sort', 'columns', 'group'), sa.Text)
    values.rewrite(
        'saved_views',
        {'id': sa.Integer, **kinds},
        lambda row: {name: re.sub(r'[\w./-]+', word, getattr(row, name)) for name in kinds},
    )
