"""Messages for invalid fields, which name the allowed values."""

from collections.abc import Mapping
from typing import Any

#: By pydantic's type of an error, with the fields of its context.
ALLOWED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "{min_length} or more characters",
    "string_type": "text",
    "too_long": "at most {max_length} entries",
    "too_short": "{min_length} or more entries",
}


def reason(error: Mapping[str, Any]) -> str:
    """Return what a field allows, or pydantic's message. error: of ValidationError.errors()."""
    if error["type"] == "extra_forbidden":
        return "unknown field"
    allowed = ALLOWED.get(error["type"])
    return f"allowed: {allowed.format(**error.get('ctx', {}))}" if allowed else str(error["msg"])
