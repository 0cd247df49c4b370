"""Sentences that state the parity of a group of runs, with its numbers."""

from app.compare.equivalence import MOST_PAIRS, POWER, Interval
from app.compare.parity import GroupParity, Parity, direction, few
from halfstep.number_formats import count, number, percent, setting

#: Margin that a sentence without one gives as an example, as a share of the reference.
USUAL_MARGIN = 0.01


def sentence(parity: Parity, group: GroupParity) -> str:
    """State how a group compares with the reference."""
    result, metric, name = group.result, _describe_value(parity, group), group.label
    if result.interval is None or result.equivalence_interval is None:
        return f"Unknown for {name}: {result.reason}."
    margin = "" if parity.margin is None else f"±{number(parity.margin)}"
    evidence = f"({result.pairs} seeds, 95 % confidence)"
    difference, error = result.difference or 0.0, (result.interval.high - result.interval.low) / 2
    if group.conclusion == "equivalent":
        text = (
            f"{name} is equivalent to {parity.reference} in {metric} within {margin} "
            f"({result.pairs} seeds, two one-sided tests at 5 %): the difference is "
            f"{number(difference)}, its 90 % interval {_range(result.equivalence_interval)}."
        )
        if result.interval.low > 0 or result.interval.high < 0:
            way = direction(difference, parity.is_low)
            text += (
                f" Within the margin it is {way} by {number(abs(difference))} ± {number(error)} "
                "(95 % confidence)."
            )
    elif group.conclusion == "undecided":
        text = (
            f"Undecided: {name} minus {parity.reference} is {number(difference)} ± "
            f"{number(error)} in {metric} {evidence}. {_what_decides(group)}"
        )
    else:
        text = (
            f"{name} is {group.conclusion} than {parity.reference} in {metric} by "
            f"{number(abs(difference))} ± {number(error)} {evidence}."
        )
        if parity.margin is not None:
            nearest = min(abs(result.interval.low), abs(result.interval.high))
            text += (
                f" The difference is larger than the margin of {margin}."
                if nearest > parity.margin
                else f" It is undecided whether it is larger than the margin of {margin}."
            )
    if group.also_differ:
        text += f" Runs of a pair also differ in {few(group.also_differ)}."
    return text


def _describe_value(parity: Parity, group: GroupParity) -> str:
    """Return the name of the compared value of the metric."""
    if parity.value == "time_to_target":
        sign = "≤" if parity.is_metric_low else "≥"
        return f"seconds until {parity.metric} {sign} {setting(parity.target)}"
    if group.range is None:
        return parity.metric
    points = f"{count(group.range.points)} common points"
    if group.range.buckets is not None:
        points += f", as means of {count(group.range.buckets)} buckets"
    steps = f"steps {count(group.range.first)} to {count(group.range.last)}"
    return f"mean {parity.metric} over {steps} ({points})"


def _range(interval: Interval) -> str:
    return f"{number(interval.low)} to {number(interval.high)}"


def _what_decides(group: GroupParity) -> str:
    further = group.result.further
    if further is None:
        references = [abs(pair.reference_value or 0.0) for pair in group.pairs]
        usual = number(USUAL_MARGIN * sum(references) / len(references))
        return (
            "A test whether they are equivalent needs a margin, the largest difference that does "
            f"not matter: {usual} would be {percent(USUAL_MARGIN)} of the reference."
        )
    many = f"more than {MOST_PAIRS:,}"
    about = f"About {further.about:,}" if further.about else many.capitalize()
    seeds = "further seed" if further.about == 1 else "further seeds"
    least, most = (f"{limit:,}" if limit else many for limit in (further.least, further.most))
    limits = f"{least} to {most}" if least != most else least
    return (
        f"{about} {seeds} would decide with a probability of {percent(POWER)}, if the "
        f"difference is as measured: an estimate, {limits} by the uncertainty of the standard "
        "deviation. Testing again with more seeds raises the rate of wrong conclusions."
    )
