"""A recipe of a user whose settings and parts have names that the product once had, too."""

from typing import ClassVar

from pydantic import Field

from trainer.recipes.digits import Digits, DigitsConfig


class OwnConfig(DigitsConfig):
    """Settings with names of a user's choice."""

    rewind: int = Field(3, title="Rewind", description="A number.")
    misshapen: bool = Field(True, title="Misshapen", description="A choice.")
    afterwards: str = Field("go on", title="Afterwards", description="A text.")


class Own(Digits):
    """Digits, under another name."""

    name: ClassVar = "own"
    title: ClassVar = "Own"
    Config: ClassVar = OwnConfig
