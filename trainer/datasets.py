"""What a recipe says about its training data, before the first of them is read."""

from torch.utils.data import IterableDataset

from halfstep.recipe import Recipe, RecipeError


def check_data(recipe: Recipe) -> None:
    """See to it that a recipe has one kind of training data, and says how many there are.

    Raises RecipeError.
    """
    has_batch = type(recipe).batch is not Recipe.batch
    if recipe.dataset is None:
        if not has_batch:
            raise RecipeError(
                f"recipe {recipe.name} has no training data: set self.dataset in __init__, or, of "
                "data that lie on the device, override batch()"
            )
        return
    if has_batch:
        raise RecipeError(
            f"recipe {recipe.name} sets self.dataset and overrides batch(): only one of them can "
            "say what a batch is"
        )
    kind = type(recipe.dataset).__name__
    if isinstance(recipe.dataset, IterableDataset):
        raise RecipeError(
            f"self.dataset is a {kind}, an IterableDataset: where a run was in it cannot be found "
            "again. Give it __getitem__ and __len__"
        )
    for method in ("__getitem__", "__len__"):
        if not hasattr(recipe.dataset, method):
            raise RecipeError(f"self.dataset is a {kind}, which has no {method}")
    recipe.train_size = len(recipe.dataset)  # type: ignore[arg-type]
    if recipe.train_size == 0:
        raise RecipeError(f"self.dataset is a {kind} without an example")
