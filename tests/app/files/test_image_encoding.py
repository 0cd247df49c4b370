"""Uploaded images: only their pixels are stored, within bounds."""

import struct
import zlib
from collections.abc import Callable
from io import BytesIO

import pytest
from PIL import Image, ImageCms, PngImagePlugin
from starlette.testclient import TestClient

from app.files import image_encoding
from app.files.image_encoding import encode_again
from db.errors import Invalid
from tests.marks import looped
from tests.pictures import picture

SCRIPT = b"<script>alert(1)</script>"
KINDS = ("PNG", "JPEG", "GIF", "WEBP")


def _with_metadata(kind: str) -> bytes:
    """Return an image with a script in each place where its format has texts."""
    exif = Image.Exif()
    exif[0x010E] = SCRIPT.decode()  # description
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes() + SCRIPT
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Comment", SCRIPT.decode())
    options = {
        "PNG": {"pnginfo": texts, "exif": exif, "icc_profile": profile},
        "JPEG": {"exif": exif, "icc_profile": profile, "comment": SCRIPT, "xmp": SCRIPT},
        "GIF": {"comment": SCRIPT},
        "WEBP": {"exif": exif, "icc_profile": profile, "xmp": SCRIPT},
    }
    return picture(kind=kind, **options[kind]) + SCRIPT


def _chunk(name: bytes, content: bytes) -> bytes:
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)


def _png_of_size(width: int, height: int) -> bytes:
    """Return a PNG that declares a size but contains no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", b"") + _chunk(b"IEND", b"")
    )


def _moving(kind: str, count: int, size: tuple[int, int] = (4, 4)) -> bytes:
    frames = [
        Image.new("RGB", size, (number * 50 % 256, 0, number % 256)) for number in range(count)
    ]
    out = BytesIO()
    more = {"duration": 40, "loop": 3, "save_all": True, "append_images": frames[1:]}
    frames[0].save(out, kind, **more)
    return out.getvalue()


@looped("kind", KINDS)
def test_only_pixels_of_an_upload_are_kept(kind: str) -> None:
    """Comments, profiles, EXIF, XMP and appended bytes of an uploaded image are dropped."""
    sent = _with_metadata(kind)
    assert SCRIPT in sent
    image = encode_again(sent)
    assert SCRIPT not in image.content
    assert (image.media_type, image.content != sent) == (f"image/{kind.lower()}", True)
    with Image.open(BytesIO(image.content)) as decoded:
        assert (decoded.format, decoded.size) == (kind, (2, 1))
        red, green, blue = decoded.convert("RGB").getpixel((0, 0))
        assert (red > 240, green < 15, blue < 15) == (True, True, True)
        assert not {"icc_profile", "exif", "xmp", "comment", "Comment"} & decoded.info.keys()


def test_the_stored_image_is_the_encoded_one(browser: TestClient) -> None:
    """The response to a download has none of the uploaded bytes other than pixels."""
    sent = _with_metadata("PNG")
    stored = browser.post("/api/v1/projects/images", content=sent).json()
    content = browser.get(stored["address"]).content
    assert content == encode_again(sent).content
    assert SCRIPT not in content
    assert stored["size_bytes"] == len(content)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_animations_keep_frames_durations_and_repetitions(kind: str) -> None:
    """Each animated format keeps its frames, durations and repetitions."""
    with Image.open(BytesIO(encode_again(_moving(kind, 5)).content)) as image:
        assert (image.n_frames, image.info["loop"]) == (5, 3)
        image.seek(4)
        image.load()
        assert image.info["duration"] == 40


@looped("mode", ["1", "L", "LA", "P", "I;16", "RGB", "RGBA"])
def test_a_png_keeps_its_pixels(mode: str) -> None:
    """A PNG keeps its pixels bit for bit, also with a palette, 16 bits or transparency."""
    image = Image.new(mode, (3, 2), 0 if mode in ("1", "L", "P", "I;16") else None)
    image.putpixel((1, 1), {"LA": (7, 99), "RGB": (1, 2, 3), "RGBA": (1, 2, 3, 4)}.get(mode, 1))
    out = BytesIO()
    image.save(out, "PNG", **({"transparency": 1} if mode == "P" else {}))
    with (
        Image.open(BytesIO(out.getvalue())) as sent,
        Image.open(BytesIO(encode_again(out.getvalue()).content)) as stored,
    ):
        assert (stored.mode, stored.tobytes()) == (sent.mode, sent.tobytes())
        assert stored.info.get("transparency") == sent.info.get("transparency")


def test_a_photo_is_stored_upright() -> None:
    """A photo is rotated as its EXIF says, and stored without it."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    image = encode_again(picture(kind="JPEG", size=(20, 10), exif=exif))
    with Image.open(BytesIO(image.content)) as upright:
        assert (upright.size, dict(upright.getexif())) == ((10, 20), {})


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(SCRIPT, id="script"),
        pytest.param(b"<svg onload=alert(1)>", id="svg"),
        pytest.param(picture(kind="BMP"), id="another format"),
        pytest.param(picture(kind="TIFF"), id="TIFF"),
        pytest.param(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", id="EPS"),
        pytest.param(picture(size=(99, 99))[:-40], id="truncated"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + b"\0" * 40, id="PNG in its first bytes only"),
        pytest.param(b"RIFF\x24\0\0\0WEBPVP8 " + b"\0" * 40, id="WebP in its first bytes only"),
        pytest.param(b"GIF89a" + b"\xff" * 40, id="damaged GIF"),
        pytest.param(b"\xff\xd8\xff" + b"\0" * 40, id="JPEG in its first bytes only"),
        pytest.param(_png_of_size(image_encoding.MOST_SIDE + 1, 1), id="too wide"),
        pytest.param(_png_of_size(1, 2**31 - 1), id="too high"),
        pytest.param(_png_of_size(8000, 8000), id="64 megapixels"),
        pytest.param(_png_of_size(60_000, 60_000), id="3.6 gigapixels"),
        pytest.param(lambda: picture(size=(5100, 5100)), id="a bomb with its pixels"),
        pytest.param(lambda: _moving("GIF", image_encoding.MOST_FRAMES + 1), id="too many frames"),
        pytest.param(lambda: _moving("GIF", 4, (2600, 2600)), id="too many pixels in frames"),
    ],
)
def test_what_is_no_image_within_bounds_is_rejected(content: bytes | Callable[[], bytes]) -> None:
    """An upload that is no image, or beyond the limits, is rejected; one that declares too large a
    size is not decoded.
    """
    with pytest.raises(Invalid) as raised:
        encode_again(content() if callable(content) else content)
    assert list(raised.value.errors) == ["body"]
    assert "allowed: " in raised.value.errors["body"]


def test_a_frame_larger_than_its_gif_is_rejected() -> None:
    """A GIF of one pixel that declares frames of 65,535 x 65,535 is rejected."""
    gif = bytearray(picture(kind="GIF", size=(1, 1)))
    at = gif.index(b",") + 5  # of the image descriptor: width and height
    gif[at : at + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(Invalid):
        encode_again(bytes(gif))
