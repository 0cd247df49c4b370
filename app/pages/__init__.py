"""The pages."""

from fastapi import APIRouter

from app.pages import account, actions, groups, new_run, run, runs, sign_in, workers

router = APIRouter(include_in_schema=False)
for module in (sign_in, runs, new_run, actions, run, groups, workers, account):
    router.include_router(module.router)
