"""Searches the mixes of one low precision with fp32 and bf16. This module imports torch.

1. All modules in the low precision, on all batches.
2. The error that each group of modules of one type and role causes alone, on the worst batch; of
   groups that cause much, also the error of each module.
3. An order of moves to fp32, or from fp16 to bf16: the largest error removed per cost comes first.
4. Each mix on that way that may be within the bounds is measured on all batches. Of the first that
   is, each move is undone if the mix stays within the bounds without it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from halfstep.precision_lab.comparison import LOW
from halfstep.precision_lab.module_survey import Survey
from halfstep.precision_lab.plan_measurement import (
    Candidate,
    Measurement,
    Situation,
    suppress_errors_of_code,
)
from halfstep.precision_lab.suggestions import LOSS, NOISE_UNITS, ROUNDING_UNIT
from halfstep.telemetry.events import PLAN_PATTERNS

#: Modules whose own error is measured one by one, after groups of modules.
MOST_SINGLE = 64
MOST_MOVES = 64
#: Changes of a mix that are undone one by one.
MOST_PRUNED = 16
#: Mixes with less error than the bounds require: each with about half of the error before.
MORE_POINTS = 3
LARGEST_SCALE = 2.0**24
#: A group causes much error if its square is this share of the sum of all squares.
LARGE_SHARE = 0.1
#: Least cost of a move, as a share of a step in low precision.
LEAST_COST = 0.01
#: Mixes whose predicted error is beyond the bound by this factor are not measured.
DOUBT = 4.0


class _Move(NamedTuple):
    """A change of the precision of some modules with all that is in them."""

    names: tuple[str, ...]
    dtype: torch.dtype
    cost: float


class PrecisionSearch:
    """A search over the mixes of one low precision."""

    def __init__(self, measurement: Measurement, dtype: torch.dtype) -> None:
        self._measurement, self._dtype, self._tree = measurement, dtype, measurement.tree
        self._scale = measurement.scale if dtype == torch.float16 else 1.0
        #: Squares of the errors that modules cause alone, by precision.
        self._squares: dict[torch.dtype, dict[str, float]] = {dtype: {}}
        self._moves: list[_Move] = []
        self.candidates: list[Candidate] = []

    def run(self) -> Candidate:
        """Search; return the best mix: within the bounds, if any is, and then the cheapest.

        Raises what the model's code raises if it does not allow this precision.
        """
        surveys = {self._dtype: self._measurement.survey(self._dtype)}
        everywhere = self._with_larger_scale(self._measure({}))
        self._scale = everywhere.point.init_scale or self._scale
        if self._dtype == torch.float16:
            if not math.isfinite(everywhere.point.error):
                self._scale = self._measurement.scale
            with suppress_errors_of_code():  # which may not allow bf16
                surveys[torch.bfloat16] = self._measurement.survey(torch.bfloat16)
        self._isolate(surveys, everywhere)
        states = list(self._states())
        if not everywhere.is_within:
            states = self._first_within(states)
        self._measure_more(states)
        return best_of(self.candidates)

    def errors(self) -> dict[str, float]:
        """Return the errors that modules' own operations cause alone."""
        return {name: math.sqrt(square) for name, square in self._squares[self._dtype].items()}

    def _measure(self, state: Mapping[str, torch.dtype]) -> Candidate:
        candidate = self._measurement.candidate(self._dtype, state, self._scale)
        self.candidates.append(candidate)
        return candidate

    def _with_larger_scale(self, everywhere: Candidate) -> Candidate:
        """Return the mix at a larger loss scale, where gradients underflow at the given one."""
        best = everywhere
        while (
            best.point.init_scale is not None
            and math.isfinite(best.point.error)
            and best.point.init_scale < LARGEST_SCALE
        ):
            self._scale = best.point.init_scale * 16
            larger = self._measure({})
            if not larger.point.error < 0.9 * best.point.error:
                break
            best = larger
        return best

    def _isolate(self, surveys: Mapping[torch.dtype, Survey], everywhere: Candidate) -> None:
        """Measure the errors that groups of modules, and single modules, cause alone."""
        worst, groups = everywhere.worst, self._measurement.groups()
        for group in groups:
            self._isolate_one(surveys, worst, group)
            self._add_moves(group)
        if everywhere.is_within:
            return
        squares = {
            group: sum(self._squares[self._dtype][name] for name in group) for group in groups
        }
        finite = sum(square for square in squares.values() if math.isfinite(square))
        left = MOST_SINGLE
        for group in sorted(groups, key=lambda group: -squares[group]):
            is_large = not squares[group] < LARGE_SHARE * finite
            if 1 < len(group) <= left and is_large:
                left -= len(group)
                for name in group:
                    self._isolate_one(surveys, worst, (name,))
                    self._add_moves((name,))

    def _isolate_one(
        self, surveys: Mapping[torch.dtype, Survey], worst: Situation, group: tuple[str, ...]
    ) -> None:
        """Measure the error of modules together, shared equally: as if they were independent."""
        with worst.ready() as comparison:
            for dtype, survey in surveys.items():
                error = survey.measure_isolated_error(
                    comparison, group, self._scale, worst.references
                )
                squares = self._squares.setdefault(dtype, {})
                squares |= dict.fromkeys(group, error**2 / len(group))
                if error <= NOISE_UNITS * ROUNDING_UNIT["float16"]:
                    break  # less than bf16 has at best

    def _add_moves(self, group: tuple[str, ...]) -> None:
        noise = (NOISE_UNITS * ROUNDING_UNIT[LOW[self._dtype]]) ** 2
        if LOSS in group and self._squares[self._dtype][LOSS] <= noise:
            return  # it needs a change of the code
        cost = self._measurement.move_cost(group, self._dtype)
        self._moves.append(_Move(group, torch.float32, max(cost, LEAST_COST)))
        in_bf16 = self._squares.get(torch.bfloat16, {})
        if self._dtype == torch.float16 and all(name in in_bf16 for name in group):
            self._moves.append(_Move(group, torch.bfloat16, LEAST_COST))

    def _states(self) -> Iterator[dict[str, torch.dtype]]:
        """Yield mixes: each with the move added that removes most of the error per cost."""
        now = dict.fromkeys(self._squares[self._dtype], self._dtype)  # precision of own operations
        state: dict[str, torch.dtype] = {}
        for _ in range(MOST_MOVES):
            gains = [(self._gain(move, now), move) for move in self._moves]
            gain, move = max(gains, key=lambda option: option[0])
            if not gain > (0, 0.0):
                return
            for name in self._tree.cover(move.names) & now.keys():
                if now[name] != torch.float32:
                    now[name] = move.dtype
            state = self._merge(state, move)
            yield state

    def _gain(self, move: _Move, now: Mapping[str, torch.dtype]) -> tuple[int, float]:
        """Return what a move gains per cost: errors that are not finite, then squares."""
        removed, infinite = 0.0, 0
        for name in self._tree.cover(move.names) & now.keys():
            if now[name] == torch.float32:
                continue
            before, after = self._square(name, now[name]), self._square(name, move.dtype)
            if math.isfinite(before) and math.isfinite(after):
                removed += before - after
            else:
                infinite += math.isfinite(after) - math.isfinite(before)
        return (infinite, 1 / move.cost) if infinite else (0, removed / move.cost)

    def _square(self, name: str, dtype: torch.dtype) -> float:
        """Return the square of a module; that of fp16 where bf16 was not measured."""
        if dtype == torch.float32:
            return 0.0
        return self._squares[dtype].get(name, self._squares[self._dtype][name])

    def _merge(self, state: Mapping[str, torch.dtype], move: _Move) -> dict[str, torch.dtype]:
        """Return a state with a move, without the modules inside of others in fp32."""
        merged = {**state, **dict.fromkeys(move.names, move.dtype)}
        in_fp32 = [name for name, dtype in merged.items() if dtype == torch.float32]
        inside = frozenset().union(*(self._tree.cover([name]) - {name} for name in in_fp32))
        return {name: dtype for name, dtype in merged.items() if name not in inside}

    def _predict(self, state: Mapping[str, torch.dtype]) -> float:
        """Return the error of a mix as if those of modules were independent."""
        of = dict.fromkeys(self._squares[self._dtype], self._dtype)
        for dtype in (torch.bfloat16, torch.float32):
            chosen = [name for name, own in state.items() if own == dtype]
            of |= dict.fromkeys(self._tree.cover(chosen) & of.keys(), dtype)
        return math.sqrt(sum(self._square(name, dtype) for name, dtype in of.items()))

    def _first_within(
        self, states: Sequence[dict[str, torch.dtype]]
    ) -> list[dict[str, torch.dtype]]:
        """Measure mixes until one is within the bounds; return those after it.

        Of many only some: as if errors fell from each to the next.
        """
        most = DOUBT * self._measurement.bounds.max_error
        usable = [state for state in states if self._is_expressible(state)]
        near = [state for state in usable if self._predict(state) <= most] or usable[-1:]
        last_outside, number = -1, 0
        while number < len(near) and not self._measure(near[number]).is_within:
            last_outside, number = number, 2 * number + 1
        if number >= len(near):
            number = len(near) - 1
            if number < 0 or number == last_outside or not self._measure(near[number]).is_within:
                return []
        while number - last_outside > 1:
            middle = (number + last_outside) // 2
            if self._measure(near[middle]).is_within:
                number = middle
            else:
                last_outside = middle
        self._prune(near[number])
        return near[number + 1 :]

    def _prune(self, state: dict[str, torch.dtype]) -> None:
        """Undo changes that the mix does not need, the last first."""
        for group in self._changes(state)[: -MOST_PRUNED - 1 : -1]:
            without = {name: dtype for name, dtype in state.items() if name not in group}
            is_less = without and len(without) < len(state) and self._is_expressible(without)
            if is_less and self._measure(without).is_within:
                state = without

    def _changes(self, state: Mapping[str, torch.dtype]) -> list[tuple[str, ...]]:
        """Return what a state consists of: single modules where these were measured, or groups."""
        groups = sorted({move.names for move in self._moves}, key=len)
        chosen: list[tuple[str, ...]] = []
        for names in groups:
            is_new = not any(name in other for other in chosen for name in names)
            if is_new and all(name in state for name in names):
                chosen.append(names)
        order = list(state)
        return sorted(chosen, key=lambda names: min(order.index(name) for name in names))

    def _measure_more(self, states: Sequence[dict[str, torch.dtype]]) -> None:
        """Measure mixes with less error than the bounds require."""
        last = best_of(self.candidates)
        if not last.is_within:
            return
        error, count = self._predict(last.state), 0
        for state in states:
            predicted = self._predict(state)
            if count < MORE_POINTS and predicted < error / 2 and self._is_expressible(state):
                self._measure(state)
                error, count = predicted, count + 1

    def _is_expressible(self, state: Mapping[str, torch.dtype]) -> bool:
        """Return whether the settings of a run can name the modules of a mix."""
        for kind in (torch.float32, torch.bfloat16):
            names = [name for name, dtype in state.items() if dtype == kind and name != LOSS]
            if len(self._tree.patterns(names)) > PLAN_PATTERNS:
                return False
        return True


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """Return the cheapest mix within the bounds; without any, that of least error."""
    return min(candidates, key=lambda candidate: candidate.point.rank)
