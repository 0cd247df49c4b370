"""JSON responses without a second validation."""

from fastapi import Response
from pydantic import BaseModel


def serialize(answer: BaseModel) -> Response:
    """Serialize a model to a JSON response; FastAPI would validate it again in a thread."""
    return Response(answer.__pydantic_serializer__.to_json(answer), media_type="application/json")
