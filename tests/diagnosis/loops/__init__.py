"""Scripts, a file for each cause or kin of causes; importing this registers all of them."""

from importlib import import_module
from pathlib import Path

for _path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"{__name__}.{_path.stem}")
