"""Answers that are asked for all the time, written as they were made."""

from fastapi import Response
from pydantic import BaseModel


def written(answer: BaseModel) -> Response:
    """Return an answer as JSON: left to FastAPI, it would go to a thread of its own to be checked
    once more.
    """
    return Response(answer.__pydantic_serializer__.to_json(answer), media_type="application/json")
