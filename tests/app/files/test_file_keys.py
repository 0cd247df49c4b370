"""Keys of a run's files: their names and kinds on the Media tab."""

from app.files.file_keys import file_keys
from db.tables import Artifact


def test_the_caption_of_a_document_is_a_text() -> None:
    """An image or a clip is shown with its caption; that of a video or a document is a text."""
    names = ["digit.png", "digit.caption.txt", "tone.wav", "tone.caption.txt"]
    names += ["page.html", "page.caption.txt", "clip.caption.txt", "clip.mp4"]
    files = [
        Artifact(id=number, step=1, name=name, size_bytes=1) for number, name in enumerate(names)
    ]
    assert {(key.name, key.kind, len(key.files)) for key in file_keys(files)} == {
        ("digit", "image", 2),
        ("tone", "audio", 2),
        ("page.html", "html", 1),
        ("page", "text", 1),
        ("clip", "text", 1),
        ("clip.mp4", "video", 1),
    }
