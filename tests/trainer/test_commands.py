"""The commands about recipes, as a person types them."""

from pathlib import Path

from tests.site import halfstep


def test_recipe_check_from_the_command() -> None:
    """The template passes, and a file that is not there is named."""
    template = Path(__file__).parents[2] / "docs" / "recipe_template.py"
    assert halfstep("recipe", "check", str(template)).returncode == 0
    assert "nowhere.py" in halfstep("recipe", "check", "nowhere.py").stderr
