"""The media type of a request or response, read as FastAPI reads it.

Its letter case, spaces and parameters have no meaning (RFC 9110, section 8.3.1).
"""

from email.message import Message

from starlette.datastructures import Headers

FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


def media_type_of(headers: Headers) -> str:
    """Return the media type in lower case, without parameters; empty if there is none."""
    declared = headers.get("content-type")
    if not declared:
        return ""
    message = Message()
    message["content-type"] = declared
    return message.get_content_type()


def is_json(headers: Headers) -> bool:
    """Return whether a body is JSON, also of a type such as application/problem+json."""
    kind, _, subtype = media_type_of(headers).partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def is_form(headers: Headers) -> bool:
    """Return whether a body is an HTML form."""
    return media_type_of(headers) in FORMS
