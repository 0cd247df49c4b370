"""A user's recipe, with settings and parts named like earlier names of the product."""

from typing import ClassVar

from pydantic import Field

from trainer.recipes.digits import Digits, DigitsConfig


class OwnConfig(DigitsConfig):
    """Settings with names that the user chose."""

    rewind: int = Field(3, title="Rewind", description="A number.")
    misshapen: bool = Field(True, title="Misshapen", description="A choice.")
    afterwards: str = Field("go on", title="Afterwards", description="A text.")


class Own(Digits):
    """Digits with another name."""

    name: ClassVar = "own"
    title: ClassVar = "Own"
    Config: ClassVar = OwnConfig
