"""Secrets in command lines."""

from halfstep import redaction
from tests.marks import looped

SECRET = "hs_0123456789"


@looped(
    "words, shown",
    [
        (["train.py", "--token", "X", "--lr", "1"], ["train.py", "--token", "***", "--lr", "1"]),
        (["--api-key=X", "-v"], ["--api-key=***", "-v"]),
        (["wandb.api_key=X", "hf.apiKey=X"], ["wandb.api_key=***", "hf.apiKey=***"]),
        (["--APIKEY", "X", "--db-password=a=b"], ["--APIKEY", "***", "--db-password=***"]),
        (["--AWS_SECRET_ACCESS_KEY", "X"], ["--AWS_SECRET_ACCESS_KEY", "***"]),
        (["--data", "https://me:pass@host/x"], ["--data", "https://***@host/x"]),
        (["--header", f"Bearer {SECRET}"], ["--header", "Bearer ***"]),
        (["--token", "--fast"], ["--token", "--fast"]),
    ],
)
def test_secrets_are_hidden(words: list[str], shown: list[str]) -> None:
    """Secrets are detected by their option's name, their position in a URL, or their value."""
    assert redaction.command(words, SECRET, None) == shown


def test_what_only_sounds_like_a_secret_is_kept() -> None:
    """Tokenizers, numbers of tokens and keys of a table are not hidden as secrets."""
    words = ["--tokenizer", "gpt2", "--max-tokens=100", "--key", "image", "--monkey", "1", "a@b"]
    assert redaction.command(words) == words


def test_a_known_secret_is_hidden_however_deep() -> None:
    """A known secret is hidden at any depth, unless it is short enough to match everywhere."""
    config = {"a": [{"token": SECRET}], "b": 1.5, "c": "a"}
    hidden = {"a": [{"token": "***"}], "b": 1.5, "c": "a"}
    assert redaction.without(config, SECRET, "a", None) == hidden
