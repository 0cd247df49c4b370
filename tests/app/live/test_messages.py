"""Messages of live streams: the browser's scripts read the fields that the server sends."""

import re
from pathlib import Path

from app.live.messages import Message

STATIC = Path(__file__).parents[3] / "app" / "static"


def test_scripts_read_fields_that_are_sent() -> None:
    """Scripts that follow a stream read only message fields that the server sends."""
    sent = {field for each in Message.__subclasses__() for field in each.__struct_fields__}
    scripts = [path.read_text() for path in STATIC.rglob("*.js")]
    follows = re.compile(r"follow\(\s*`|message\.steps")
    scripts = [text for text in scripts if follows.search(text)]
    read = {name for text in scripts for name in re.findall(r"\bmessage\.(\w+)", text)}
    assert len(scripts) >= 5
    assert {"run", "rows", "steps", "metrics", "log", "fragments", "is_worker_up"} <= read <= sent
