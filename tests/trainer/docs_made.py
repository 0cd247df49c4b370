"""Shared helpers of the tests of docs."""

import re
from pathlib import Path

LOADING = Path("docs/how-to/recipes.md").read_text().partition("## Loading saved weights\n")[2]


LINES = re.findall(
    r"^([A-Z][^\n]*)\n\n```python\n(.*?)```", LOADING.partition("\n## ")[0], re.M | re.S
)
