"""The walk from a symptom back to the operator where it began."""

from collections.abc import Callable, Iterable, Iterator

from halfstep.shadow.facts import Facts
from halfstep.shadow.operations import OUTSIDE, Kept, Operation
from halfstep.shadow.operators import DIFFERENCES, DIVISIONS, MOVES
from halfstep.shadow.scale import is_unknown

MOST_STEPS = 10_000
MOST_ANCESTORS = 100_000
ROOTS = frozenset({"sqrt", "rsqrt", "log", "log2", "log10"})
SUBTRACTIONS = frozenset({"sub", "rsub"})


def first_defect(operation: Operation) -> Operation:
    """Return the first operation with the defect of an operation's nonfinite result.

    Values lost to half precision are followed as such, also past others that are NaN in fp32.
    """
    is_lost = has_lost(operation)

    def sources(current: Operation) -> list[Operation]:
        if current.name == OUTSIDE or current.result is None:
            return []
        return writers(current, _defect(current, current.result, is_lost=is_lost))

    return _walk_back(operation, sources)


def _walk_back(
    operation: Operation, sources: Callable[[Operation], Iterable[Operation]]
) -> Operation:
    """Return the earliest operation that is reached by its sources and theirs, and has none."""
    open_, seen, ends = [operation], {operation.number}, [operation]
    while open_ and len(seen) < MOST_STEPS:
        current = open_.pop()
        found = [source for source in sources(current) if source.number < current.number]
        ends += [] if found else [current]
        open_ += [source for source in found if source.number not in seen]
        seen.update(source.number for source in found)
    return min(ends, key=lambda end: end.number)


def first_scaled(operation: Operation) -> Operation:
    """Return the first operation of the forward pass that led to a result with a loss scale."""
    return _walk_back(
        operation,
        lambda current: [
            writer
            for writer in _sources(current)
            if writer.power != 0 and not writer.is_backward and writer.name != OUTSIDE
        ],
    )


def first_edit(gradient: Operation) -> Operation | None:
    """Return the first operation of those that made a scaled gradient depend on it in another way.

    None if a gradient is proportional to the scale, was never scaled, or if that is not known.
    """
    if not _is_edited(gradient):
        return None
    return _walk_back(gradient, lambda current: filter(_is_edited, _sources(current)))


def _is_edited(operation: Operation) -> bool:
    """Return whether a scaled value led to a result that is not proportional to the scale."""
    return operation.is_of_scale and operation.power != 1 and not is_unknown(operation.power)


def has_lost(operation: Operation) -> bool:
    """Return whether all that is wrong with a result was lost to half precision."""
    facts = operation.result
    return facts is not None and bool(facts.lost) and not facts.shadow_nan


def first_infinity(operation: Operation) -> Operation:
    """Return the first operation with an infinity, of those that an operation received."""
    return _walk_back(operation, lambda current: writers(current, lambda facts: facts.has_infinity))


def has_root_of_difference(operation: Operation, before: Operation) -> bool:
    """Return whether a root or logarithm of a difference led from one operation to a result.

    Such as a deviation from a mean of squares: bf16, with its few digits, rounds the difference to
    0 or below. before: the operation from which on.
    """
    open_, seen = [(operation, False)], {(operation.number, False)}
    while open_ and len(seen) < MOST_STEPS:
        current, is_of_root = open_.pop()
        if is_of_root and current.name.rstrip("_") in SUBTRACTIONS:
            return True
        is_of_root = is_of_root or current.name.rstrip("_") in ROOTS
        for source in writers(current, lambda facts: bool(facts.nonfinite)):
            is_between = before.number <= source.number < current.number
            if is_between and (source.number, is_of_root) not in seen:
                seen.add((source.number, is_of_root))
                open_.append((source, is_of_root))
    return False


def writers(operation: Operation, has_defect: Callable[[Facts], bool]) -> list[Operation]:
    """Return the operations that have put a defect into an operation's inputs."""
    return [
        writer
        for operand in operation.inputs
        if operand.facts is not None and has_defect(operand.facts)
        for writer in operand.writers
        if writer.result is not None and has_defect(writer.result)
    ]


def earliest(operations: Iterable[Operation], before: Operation) -> Operation | None:
    """Return the first of those that ran before an operation."""
    return min(
        (operation for operation in operations if operation.number < before.number),
        key=lambda operation: operation.number,
        default=None,
    )


def find_flushed_inputs(operation: Operation) -> list[Facts]:
    """Return what is wrong in the inputs that are 0 only in half precision."""
    inputs = operation.inputs[-1:] if operation.name in DIVISIONS else operation.inputs
    return [
        operand.facts for operand in inputs if operand.facts is not None and operand.facts.flushed
    ]


def first_flushed(operation: Operation) -> Operation:
    """Return the operation in which a value became 0 that an operation received as 0."""

    def sources(current: Operation) -> list[Operation]:
        inputs = current.inputs
        if current is operation and operation.name in DIVISIONS:
            inputs = inputs[-1:]
        elif current is not operation and current.name in DIFFERENCES:
            return []
        return [
            writer
            for operand in inputs
            if operand.facts is None or operand.facts.flushed
            for writer in operand.writers
            if writer.result is not None and writer.result.flushed
        ]

    return _walk_back(operation, sources)


def first_emptied(gradient: Operation) -> Operation:
    """Return the operation in which most of what led to a gradient became 0."""
    return _walk_back(gradient, lambda current: filter(_is_emptied, _sources(current)))


def find_emptying_overflow(written: Operation) -> tuple[Operation, Operation] | None:
    """Return the overflow by which most of a value became 0 that an operation has received.

    With the operation where it became 0, such as the division of a matrix by its norm.
    """
    for operand in written.inputs:
        if _is_emptied(operand.writers[-1]):
            emptied = first_emptied(operand.writers[-1])
            overflows = writers(emptied, lambda facts: bool(facts.lost))
            if (overflow := earliest(overflows, before=emptied)) is not None:
                return overflow, emptied
    return None


def _is_emptied(operation: Operation) -> bool:
    """Return whether at least half of a result is 0 only in half precision."""
    facts = operation.result
    return facts is not None and 2 * facts.flushed >= facts.elements


def _sources(operation: Operation) -> list[Operation]:
    return [writer for operand in operation.inputs for writer in operand.writers]


def first_rounded(operation: Operation) -> Operation:
    """Return the operation that has rounded the input of another, or that itself."""
    found = max(operation.rounded, key=lambda writer: writer.number, default=None)
    if found is None or found.name == OUTSIDE:
        return operation
    for _ in range(MOST_STEPS):
        sources = [operand.writers[-1] for operand in found.inputs] if found.name in MOVES else []
        if len(sources) != 1 or sources[0].name == OUTSIDE:
            break
        [found] = sources
    return found


def _defect(operation: Operation, facts: Facts, *, is_lost: bool) -> Callable[[Facts], bool]:
    """Return whether a tensor has the gravest defect of an operation's result."""
    if operation.is_unknown:
        return lambda other: bool(other.lost or other.shadow_nan or other.nan)
    if facts.shadow_nan and not is_lost:
        return lambda other: bool(other.shadow_nan)
    if facts.lost:
        return lambda other: bool(other.lost)
    if facts.nan:
        return lambda other: bool(other.nan)
    return lambda other: other.has_infinity


def ancestors(operation: Operation) -> Iterator[Operation]:
    """Yield an operation and all that led to its result, as far as they are known."""
    open_, seen = [operation], {operation.number}
    while open_ and len(seen) < MOST_ANCESTORS:
        current = open_.pop()
        yield current
        for operand in current.inputs:
            new = [writer for writer in operand.writers if writer.number not in seen]
            seen.update(writer.number for writer in new)
            open_ += new


def find_carried_source(operation: Operation) -> Operation | None:
    """Return a tensor that an earlier step has left nonfinite, among all that led to a result."""
    carried = (
        ancestor for ancestor in ancestors(operation) if ancestor.carried and ancestor.result
    )
    return next(carried, None)


def find_kept(operation: Operation) -> Kept | None:
    """Return what an earlier step has kept of scaled gradients, if that led to a result."""
    return next((each.kept for each in ancestors(operation) if each.kept is not None), None)


def find_large(operation: Operation) -> Operation | None:
    """Return the tensor with the largest numbers from outside of the step that led to a result."""
    large = [ancestor for ancestor in ancestors(operation) if ancestor.largest]
    return max(large, key=lambda ancestor: ancestor.largest, default=None)
