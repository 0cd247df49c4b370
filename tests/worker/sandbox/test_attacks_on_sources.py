"""Attacks by files that the service reads for a run: sources, repositories, working folders."""

import pytest

from tests.worker.sandbox.target import RUN_USERS, Target, worker_kind

pytestmark = pytest.mark.slow


@worker_kind(RUN_USERS)
def test_the_service_reads_no_file_for_a_run(target: Target) -> None:
    """Links and repositories of a run reveal no secret as a later run's source or diff."""
    victim = target.victim
    private = f"{victim['cwd']}/private.py"
    secrets = [str(target.key), str(target.canary), private, "/proc/self/environ"]
    secrets += [target.site.url.removeprefix("sqlite:///"), "/etc/shadow"]
    plan = {"targets": secrets, "names": ["secrets.key"], "data": str(target.site.data)}
    plan |= {"victim": victim["cwd"], "head": victim["head"]}
    first = target.attack("links.py", plan=plan)
    made = target.result(first)
    folder = made["folder"]
    ids = [target.submit(f"python {each}", folder=folder) for each in made["sources"]]
    ids += [target.submit("true", folder=f"{folder}/{each}") for each in made["folders"]]
    ids += [target.submit(f"python {each}") for each in (private, str(target.canary))]
    ids += [target.submit("python private.py", folder=victim["cwd"])]
    target.wait(*ids)
    assert target.list_exposed([first, *ids]) == {}


@pytest.mark.extended
def test_a_later_attempt_reads_no_file_for_an_earlier_one(target: Target) -> None:
    """A source that a killed run replaced by a link reveals no secret at the next attempt."""
    secrets = [str(target.key), str(target.canary), "/proc/self/environ", "/dev/null"]
    ids = [
        target.attack("again", "x.py", plan={"source": each, "git": git})
        for each in secrets
        for git in ["" if each != "/dev/null" else f"{target.victim['cwd']}/.git"]
    ]
    target.wait(*ids)
    assert {target.site.run(each).attempt > 1 for each in ids} == {True}
    assert target.list_exposed(ids) == {}
