"""Uploaded images, decoded within bounds and encoded again.

What is stored and served is our encoder's output: no metadata, no appended bytes, no file that a
browser could also read as another type.
"""

import hashlib
from io import BytesIO
from typing import NamedTuple

from PIL import Image, ImageOps
from PIL.ImageSequence import Iterator as Frames

from db.errors import Invalid

#: Largest width or height.
MOST_SIDE = 16_384
#: Largest number of pixels, of all frames together: up to 440 MB while they are encoded, for WebP.
MOST_PIXELS = 25_000_000
MOST_FRAMES = 1000
LIMITS = (
    f"{MOST_PIXELS:,} pixels in all frames, {MOST_SIDE:,} in width or height, "
    f"{MOST_FRAMES:,} frames"
)
#: Ending of a file by the format of its content.
ENDINGS = {"PNG": "png", "JPEG": "jpg", "GIF": "gif", "WEBP": "webp"}
MEDIA_TYPES = {name: f"image/{name.lower()}" for name in ENDINGS}
ALLOWED = "allowed: an image in PNG, JPEG, GIF or WebP"
#: Modes that are kept in a PNG of one frame: of few colours, or of 16 bits.
PNG_MODES = ("1", "L", "LA", "P", "I;16", "RGB", "RGBA")
OPTIONS: dict[str, dict[str, object]] = {
    "PNG": {},
    "JPEG": {"quality": 90},
    "GIF": {"disposal": 2},
    "WEBP": {"quality": 90, "method": 2},
}

#: Pillow's own limit: a frame may be larger than the image that declares it.
Image.MAX_IMAGE_PIXELS = MOST_PIXELS


class EncodedImage(NamedTuple):
    """An image as it is stored."""

    content: bytes
    media_type: str
    ending: str
    sha256: str


def encode_again(content: bytes) -> EncodedImage:
    """Return an uploaded image, encoded again in the same format. Raises Invalid."""
    if not content:
        raise Invalid({"body": f"it is empty; {ALLOWED}"})
    try:
        with Image.open(BytesIO(content), formats=tuple(ENDINGS)) as image:
            kind = "JPEG" if image.format == "MPO" else str(image.format)  # MPO: from phones
            encoded = _encode(image, kind)
    except Invalid:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Invalid({"body": f"the image is too large; allowed: {LIMITS}"}) from error
    except Exception as error:  # a decoder may raise anything for a damaged file
        text = f"it begins with {content[:8]!r} and cannot be read"
        raise Invalid({"body": f"{text}; {ALLOWED}"}) from error
    sha256 = hashlib.sha256(encoded).hexdigest()
    return EncodedImage(encoded, MEDIA_TYPES[kind], ENDINGS[kind], sha256)


def _encode(image: Image.Image, kind: str) -> bytes:
    is_moving = kind != "JPEG" and getattr(image, "is_animated", False)
    frames: list[Image.Image] = []
    durations = []  # of frames, in milliseconds
    for frame in Frames(image) if is_moving else [image]:
        _check_size(image, len(frames) + 1)
        frame.load()
        durations.append(_clamp(frame.info.get("duration", 0)))
        frames.append(_plain(frame, kind, is_moving=is_moving))
    options = dict(OPTIONS[kind])
    if is_moving:
        options |= {"save_all": True, "append_images": frames[1:], "duration": durations}
        options |= {"loop": _clamp(image.info["loop"])} if "loop" in image.info else {}
    out = BytesIO()
    frames[0].save(out, kind, **options)
    return out.getvalue()


def _check_size(image: Image.Image, frames: int) -> None:
    """Check the size that an image declares, before it is decoded. Raises Invalid."""
    width, height = image.size
    is_larger = max(width, height) > MOST_SIDE or width * height * frames > MOST_PIXELS
    if is_larger or frames > MOST_FRAMES:
        size = f"{width:,} × {height:,} pixels" + (f" and {frames:,} frames" if frames > 1 else "")
        raise Invalid({"body": f"the image has {size}; allowed: {LIMITS}"})


def _plain(frame: Image.Image, kind: str, *, is_moving: bool) -> Image.Image:
    """Return a frame's pixels only, upright. A single one is not copied, for the memory."""
    frame = frame.copy() if is_moving else frame
    if not is_moving:
        ImageOps.exif_transpose(frame, in_place=True)
    is_kept = kind == "PNG" and not is_moving and frame.mode in PNG_MODES
    mode = "RGBA" if kind != "JPEG" and frame.has_transparency_data else "RGB"
    if not is_kept and frame.mode != mode:
        frame = frame.convert(mode)
    transparency = frame.info.get("transparency") if is_kept else None
    frame.info = {} if transparency is None else {"transparency": transparency}
    return frame


def _clamp(number: float) -> int:
    """Return a duration or a number of repetitions as formats can express it."""
    return min(max(int(number), 0), 65_535)
