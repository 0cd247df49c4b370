"""Codes for a terminal in what scripts print: colours, cursor, links, titles."""

import re

#: Control sequences (ECMA-48 CSI), strings such as OSC 8's links to their end or that of the line,
#: and other codes of two characters. app/static/run/log.js has the same pattern.
CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def without_codes(text: str) -> str:
    """Return a text as it would be read, without codes for a terminal."""
    return CODES.sub("", text)
