"""Small images, encoded by Pillow."""

from io import BytesIO
from typing import Any

from PIL import Image


def picture(
    color: str = "red", kind: str = "PNG", size: tuple[int, int] = (2, 1), **options: Any
) -> bytes:
    """Return an image of one color."""
    out = BytesIO()
    Image.new("RGB", size, color).save(out, kind, **options)
    return out.getvalue()
