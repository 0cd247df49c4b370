"""Capabilities of a machine: devices, recipes and versions, read by a short-lived child process.

The child may load torch and the recipes, or be forked from the worker's warm process. The worker
waits for it only at its start, and starts another one when a recipe's file changes. A further
child measures the memory of recipes some time after the start, so that queued runs begin first.
"""

import logging
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from db.errors import HalfstepError
from db.settings import Settings
from halfstep.fork_server import Forked
from halfstep.machine_offer import MachineOffer, RecipeMemory, RecipeOffer, read_offer
from worker import gpus
from worker.sandbox import run_environment
from worker.warm_start import WarmProcess

logger = logging.getLogger(__name__)

#: A recipe that takes longer to load is probably in an endless loop.
LONGEST_SECONDS = 120.0
#: Delay between loading recipes and measuring their memory.
COUNTED_AFTER_SECONDS = 60.0

#: Child that loads the recipes.
Probe: TypeAlias = "subprocess.Popen[bytes] | Forked"
#: State of each file, which changes when it is written; None if it is missing.
Seen = dict[str, tuple[int, int, int] | None]


class Capabilities:
    """The capabilities of this machine, kept up to date with its recipes' files."""

    def __init__(self, settings: Settings, warm: WarmProcess | None = None) -> None:
        """warm: forks the child, if it can."""
        self._settings, self._warm = settings, warm
        self._files: set[str] = set()
        self._seen: Seen = {}
        self._child: Probe | None = None
        self._outputs: list[IO[bytes]] = []  # output and errors of the child
        self._deadline = 0.0
        self._offer = MachineOffer()
        self._counter: subprocess.Popen[bytes] | None = None
        self._count_at = 0.0

    def learn(self) -> MachineOffer:
        """Read devices, recipes and versions, and wait. Raises HalfstepError."""
        child = self._start_probe(self._warm, LONGEST_SECONDS)
        if isinstance(child, Forked):
            if not child.wait_for_end(LONGEST_SECONDS):
                child.kill()
            _release(child)
            try:  # the exit code comes later; without success it has not printed an offer
                return self._parse_output(exit_code=0)
            except HalfstepError as error:  # it may have ended with the warm process
                logger.warning("the probe starts as a program: %s", error)
            child = self._start_probe(None)
        return self._parse_output(child.wait())

    @property
    def is_loading(self) -> bool:
        """Whether recipes are being reloaded."""
        return self._child is not None

    def poll_changes(self) -> MachineOffer | None:
        """Return the capabilities if a changed file changed them, else None. Does not wait."""
        if self._child is None:
            if self._file_states() != self._seen:
                logger.info("a recipe's file has changed: reloading recipes")
                self._child = self._start_probe(self._warm)
                return None
            return self._poll_counter()
        exit_code = self._child.poll()
        if exit_code is None:
            if time.monotonic() > self._deadline:
                self.close()
                logger.warning("recipes are unchanged; loading them took %.0f s", LONGEST_SECONDS)
            return None
        _release(self._child)
        self._child = None
        try:
            return self._parse_output(exit_code)
        except HalfstepError as error:
            logger.error("%s", error)
            return None

    def close(self) -> None:
        """End a running child."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            _release(self._child)
            self._child = None
            self._read_outputs()
        if self._counter is not None:
            self._counter.kill()
            self._counter.communicate()
            self._counter = None

    def _poll_counter(self) -> MachineOffer | None:
        """Return the capabilities once they include the memory of the recipes."""
        now = time.monotonic()
        if self._counter is None and now > self._count_at:
            self._count_at = now + LONGEST_SECONDS
            self._counter = self._count()
        if self._counter is None:
            return None
        if self._counter.poll() is None:
            if now > self._count_at:
                self._counter.kill()
            return None
        answer, _errors = self._counter.communicate()
        self._counter, self._count_at = None, math.inf
        counted = _memory(answer)
        recipes = [
            replace(recipe, memory=counted.get(recipe.reference, recipe.memory))
            for recipe in self._offer.recipes
        ]
        self._offer = replace(self._offer, recipes=recipes)
        return self._offer if counted else None

    def _count(self) -> "subprocess.Popen[bytes] | None":
        """Start measuring the memory of loadable recipes that lack it."""
        known = [recipe for recipe in self._offer.recipes if recipe.is_offered]
        references = [offered.reference for offered in known if offered.memory is UNSET]
        if not references:
            self._count_at = math.inf
            return None
        return subprocess.Popen(
            [sys.executable, "-m", "trainer.memory", *references],
            env=run_environment.of_recipes(self._settings) | {"CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _start_probe(self, warm: WarmProcess | None, patience: float = 0.0) -> "Probe":
        """Start the child. patience: seconds to wait for a warm process that is loading."""
        # Before the child starts, so that a later change is detected.
        self._seen = self._file_states()
        self._outputs = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115 - a pipe would fill
        self._deadline = time.monotonic() + LONGEST_SECONDS
        files = [file.fileno() for file in self._outputs]
        if warm and (forked := warm.fork("trainer.probe", files, patience)):
            return forked
        return subprocess.Popen(
            [sys.executable, "-m", "trainer.probe"],
            env={**run_environment.of_recipes(self._settings), **gpus.environment()},
            stdin=subprocess.DEVNULL,
            stdout=self._outputs[0],
            stderr=self._outputs[1],
        )

    def _parse_output(self, exit_code: int) -> MachineOffer:
        answer, errors = self._read_outputs()
        if exit_code != 0:
            raise HalfstepError(f"This machine's devices cannot be detected:\n{errors[-4000:]}")
        try:
            offer = read_offer(answer.splitlines()[-1])
        except (ValueError, IndexError) as error:
            text = f"This machine's devices cannot be detected: {error}"
            raise HalfstepError(f"{text}\n{errors[-4000:]}") from error
        for recipe in offer.recipes:
            if recipe.error is not UNSET:
                place = f"{recipe.place}: " if recipe.place else ""
                words = "recipe %s is not offered: %s%s"
                logger.error(words, recipe.name, place, recipe.error)
            if recipe.needs is not UNSET:
                logger.info("recipe %s is not offered: it needs %s", recipe.name, recipe.needs)
        before = {_version(offered): offered.memory for offered in self._offer.recipes}
        recipes = [
            replace(offered, memory=before.get(_version(offered), UNSET))
            for offered in offer.recipes
        ]
        offer = replace(offer, recipes=recipes)
        self._offer, self._count_at = offer, time.monotonic() + COUNTED_AFTER_SECONDS
        self._files = {offered.file for offered in offer.recipes if isinstance(offered.file, str)}
        # Files known before keep the state that they had when the child started.
        states = self._file_states()
        self._seen = {file: self._seen.get(file, state) for file, state in states.items()}
        return offer

    def _read_outputs(self) -> list[str]:
        texts = []
        for file in self._outputs:
            with file:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return texts

    def _file_states(self) -> Seen:
        registered = str(self._settings.data / "recipes.json")
        return {file: _state(Path(file)) for file in {registered, *self._files}}


def _release(child: "Probe") -> None:
    if isinstance(child, Forked):
        child.release()


def _version(recipe: RecipeOffer) -> tuple[str, str | UnsetType]:
    return recipe.reference, recipe.sha256


def _memory(answer: bytes) -> dict[str, RecipeMemory]:
    """Return the memory of recipes by reference, as `trainer.memory` printed it."""
    try:
        return msgspec.json.decode(answer.splitlines()[-1], type=dict[str, RecipeMemory])
    except (msgspec.DecodeError, IndexError):  # it was killed, or a recipe printed at its exit
        return {}


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
