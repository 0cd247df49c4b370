"""Checks of a recipe's training data before the first example is read."""

from torch.utils.data import IterableDataset

from halfstep.recipe import Recipe, RecipeError


def check_data(recipe: Recipe) -> None:
    """Raise RecipeError unless a recipe has one kind of training data, and an example of it."""
    has_batch = type(recipe).batch is not Recipe.batch
    if recipe.dataset is None:
        if not has_batch:
            raise RecipeError(
                f"recipe {recipe.name} has no training data: set self.dataset in __init__, or "
                "override batch() for data on the device"
            )
        return
    if has_batch:
        raise RecipeError(
            f"recipe {recipe.name} sets self.dataset and overrides batch(): use only one of them"
        )
    kind = type(recipe.dataset).__name__
    is_stream = isinstance(recipe.dataset, IterableDataset)
    needed = ("state_dict", "load_state_dict") if is_stream else ("__getitem__", "__len__")
    if missing := [method for method in needed if not hasattr(recipe.dataset, method)]:
        why = (
            ", an IterableDataset: a resumed run must find its position in it" if is_stream else ""
        )
        raise RecipeError(f"self.dataset is a {kind}{why}. It has no {' and no '.join(missing)}")
    if recipe.train_size == 0 and not is_stream:
        raise RecipeError(f"self.dataset is a {kind} without an example")
