"""Forms to save and delete presets of the form of a new run."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from app.auth.audit import audited
from app.auth.authentication import SignedIn
from app.auth.permissions import ACCOUNT, check_project, requires
from app.dependencies import Db, Posted
from app.html.flash import back_to
from app.http.parameters import RowId
from app.submission import forms, new_run_pages
from app.submission.new_run_pages import RUN_FIELDS
from app.submission.presets import save
from app.submission.submission import Submission
from db.access.permissions import Permission
from db.errors import Invalid
from db.queue import workers
from db.runs import presets

router = APIRouter(prefix="/presets")


@router.post("")
@requires(ACCOUNT)
@audited("preset", "recipe", "project")
def save_preset(request: Request, session: Db, posted: Posted, principal: SignedIn) -> Response:
    """Save the form's values under a name, or show the form with its errors."""
    recipe = str(posted.get("recipe", ""))
    schema = workers.recipe(session, recipe)["schema"]
    values = {name: str(posted.get(name, "")).strip() for name in (*RUN_FIELDS, "preset")}
    config = forms.read(schema, posted)
    try:
        numbers, errors = new_run_pages.numbers(values, posted)
        fields: dict[str, Any] = {name: numbers[name] for name in presets.PLACE if name in numbers}
        fields["tags"] = values["tags"]
        fields["project"] = values["project"] or None
        submission = Submission(recipe=recipe, config=config, **fields)
        saved = save(session, principal.user, values["preset"], submission, known=errors)
    except Invalid as error:
        # The form's `name` is the run's, which a preset does not store.
        wrong = {"preset" if path == "name" else path: text for path, text in error.errors.items()}
        return new_run_pages.form(request, session, principal, recipe, config, values, wrong)
    return back_to(request, f"/runs/new?preset={saved.id}", f"The preset {saved.name} is saved.")


@router.post("/{preset_id}/deletion")
@requires(ACCOUNT)
def delete_preset(
    request: Request, preset_id: RowId, session: Db, _principal: SignedIn
) -> RedirectResponse:
    """Delete a preset."""
    preset = presets.get(session, preset_id)
    check_project(session, Permission.SUBMIT_RUN, preset.project)
    session.delete(preset)
    return back_to(
        request, f"/runs/new?recipe={preset.recipe}", f"The preset {preset.name} is deleted."
    )
