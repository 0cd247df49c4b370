"""Changes of values that the product wrote; values of users stay as they are."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op

Names = Mapping[str, str]
#: Keys of a configuration that are the product's, in runs, presets and sweeps of a recipe.
SPIKE = "spike"
PAGE = 500  # rows
OF_RECIPES = "run_id IN (SELECT id FROM runs WHERE recipe <> '')"


def rewrite(
    table: str,
    columns: Mapping[str, Any],
    change: Callable[[Any], Mapping[str, Any]],
    where: str = "true",
) -> None:
    """Update the rows for which `change` returns other values.

    columns: types by name; the first is a unique number.
    """
    if op.get_context().as_sql:  # a new database, which has no rows
        return
    rows = sa.table(table, *(sa.column(name, kind) for name, kind in columns.items()))
    key = rows.c[next(iter(columns))]
    connection, last = op.get_bind(), -1
    query = sa.select(rows).where(sa.text(where)).order_by(key).limit(PAGE)
    while page := connection.execute(query.where(key > last)).all():
        for row in page:
            last = row[0]
            changed = {
                name: value for name, value in change(row).items() if value != getattr(row, name)
            }
            if changed:
                connection.execute(sa.update(rows).where(key == last).values(changed))


def renamed(value: Any, names: Names) -> Any:
    """Return an object with other names for its keys; anything else as it is."""
    return (
        {names.get(name, name): each for name, each in value.items()}
        if isinstance(value, dict)
        else value
    )


def inverse(names: Names) -> dict[str, str]:
    """Return the names for a downgrade."""
    return {new: old for old, new in names.items()}


def rename_spike(names: Names, choices: Names) -> None:
    """Rename settings of `spike`, and values of its setting `afterwards`, of recipes' runs."""
    paths = {f"{SPIKE}.{old}": f"{SPIKE}.{new}" for old, new in names.items()}

    def config(value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value, dict) or not isinstance(value.get(SPIKE), dict):
            return value
        spike = renamed(value[SPIKE], names)
        if spike.get("afterwards") in choices:
            spike["afterwards"] = choices[spike["afterwards"]]
        return {**value, SPIKE: spike}

    of_config = {"id": sa.Integer, "recipe": sa.Text, "config": sa.JSON}
    for table in ("runs", "presets"):
        rewrite(table, of_config, lambda row: {"config": config(row.config)} if row.recipe else {})
    rewrite(
        "sweeps",
        {**of_config, "space": sa.JSON},
        lambda row: (
            {"config": config(row.config), "space": renamed(row.space, paths)} if row.recipe else {}
        ),
    )
    for old, new in names.items():
        op.execute(
            f"UPDATE run_config_values SET path = '{SPIKE}.{new}', name = '{new}' "
            f"WHERE path = '{SPIKE}.{old}' AND {OF_RECIPES}"
        )
    for old, new in choices.items():
        op.execute(
            f"UPDATE run_config_values SET text = '{new}' "
            f"WHERE path = '{SPIKE}.afterwards' AND text = '{old}' AND {OF_RECIPES}"
        )
    rename_in_views({**paths, **_unambiguous(names)}, {}, {})


def rename_trial_params(names: Names) -> None:
    """Rename paths of settings of `spike` in what the trials of recipes' sweeps have tried."""
    paths = {f"{SPIKE}.{old}": f"{SPIKE}.{new}" for old, new in names.items()}
    rewrite(
        "trials",
        {"run_id": sa.Integer, "params": sa.JSON},
        lambda row: {"params": renamed(row.params, paths)},
        OF_RECIPES,
    )


def rename_in_views(words: Names, columns: Names, states: Names) -> None:
    """Rename whole words of saved views: columns, settings and metrics, and values of `status:`."""
    if op.get_context().as_sql:
        return
    word = re.compile(r'(?<![\w./:"-])-?[\w./-]+(?![\w./-])')

    def in_text(text: str, names: Names) -> str:
        def one(match: re.Match[str]) -> str:
            sign = "-" if match[0].startswith("-") else ""
            return sign + names.get(match[0].removeprefix("-"), match[0].removeprefix("-"))

        return word.sub(one, text)

    def of_states(match: re.Match[str]) -> str:
        return match[1] + ",".join(states.get(each, each) for each in match[2].split(","))

    kinds = dict.fromkeys(("filter", "sort", "columns", "group"), sa.Text)
    rewrite(
        "saved_views",
        {"id": sa.Integer, **kinds},
        lambda row: {
            "filter": re.sub(r"(?<!\S)(-?status:)(\S+)", of_states, in_text(row.filter, words)),
            "sort": in_text(row.sort, words),
            "columns": in_text(row.columns, {**words, **columns}),
            "group": in_text(row.group, words),
        },
    )


def rename_in_diagnoses(fields: Mapping[str, Names]) -> None:
    """Rename fields of diagnoses. fields: names by kind."""
    rewrite(
        "diagnoses",
        {"id": sa.Integer, "kind": sa.Text, "content": sa.JSON},
        lambda row: {"content": renamed(row.content, fields[row.kind])},
        f"kind IN ({', '.join(map(repr, fields))})",
    )


def _unambiguous(names: Names) -> dict[str, str]:
    """Return those of these names of settings that no other setting has, once renamed."""
    if op.get_context().as_sql:
        return {}
    used = set(
        op.get_bind().execute(sa.text("SELECT DISTINCT name FROM run_config_values")).scalars()
    )
    return {old: new for old, new in names.items() if old not in used}
