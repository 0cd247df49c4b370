"""Remedies that a finding offers, parsed from its text, its remedies and its lines of code.

A clause offers a remedy if it has a verb that asks for it and nothing that rules it out: "use bf16"
does, "bf16 would not help" and "no smaller scale helps" do not.
"""

import re
from collections.abc import Iterable
from itertools import combinations

from halfstep.diagnosis.finding import Finding

#: What ends a clause, so that what one rules out the next may offer.
CLAUSES = re.compile(
    r"(?<=[a-z0-9)`])[.;:!?](?:\s|$)|\n|, (?=but\b|so\b)|(?=\brather than\b|\binstead of\b)"
)
RULED_OUT = re.compile(
    r"\b(no|not|never|neither|nor|cannot|won't|would harm|harms?|useless|nothing|without effect"
    r"|in vain|rules? out|ruled out|has no part|instead of|rather than)\b|n't\b",
    re.IGNORECASE,
)
#: An imperative verb; not a noun of the same form, as in "the same run in fp32".
ASKS = (
    r"(?<!\bthe )(?<!\bsame )(?<!\bthis )(?<!\bthat )(?<!\beach )(?<!\ba )"
    r"\b(use|try|tries|run|compute|train|set|start|lower|reduce|decrease|halve|raise|increase|keep"
    r"|add|call|put|move|switch|choose|let|pass|replace|restore|save|load|clip|clamp|clear|convert"
    r"|cast|give|take|make|unscale|enlarge|grow|shrink|mend|need|go back|continue)\b"
)
SMALLER = r"\b(smaller|lower|lowers?|reduced?|decrease|halve|shrink)\b"
LARGER = r"\b(larger|higher|raise|increase|enlarge|grow)\b"
#: Words of a clause with a remedy.
WORDS: dict[str, str] = {
    "bf16": r"\b(bf16|bfloat16)\b",
    "fp32": r"\b(fp32|float32)\b|autocast\([^)]*enabled=False",
    "lower_rate": rf"{SMALLER}[^.]*\b(learning[ -]rate|lr)\b",
    "smaller_scale": rf"{SMALLER}[^.]*\b(init_scale|(?<!time)scale)\b|let the scale fall",
    "larger_scale": rf"{LARGER}[^.]*\b(init_scale|scale)\b",
    "growth_interval": r"\bgrowth_interval\b",
    "eps": r"\b(eps|epsilon)\b",
    "restore": r"scaler\.load_state_dict|scaler\.state_dict|(restore|save|load)[^.]*\bscaler",
    "zero_grad": r"\bzero_grad\b|clear (the )?gradients",
    "unscale": r"\bunscale_|unscale (the )?gradients",
    "clip": r"\bclip(_grad_norm_|_grad_value_)?\b(?! after| before)",
}
#: Words of a remedy's name, as app.telemetry.suggested_actions has it.
NAMES = {
    "bf16": "bf16",
    "fp32": "fp32",
    "lower_rate": "lower_rate",
    "usual_rate": "lower_rate",
    "floor": "larger_scale",
}
#: Words that a line of code shows though it only stands there to show the place.
PLACES = ("zero_grad", "unscale", "clip")
CODE: dict[str, str] = {
    "bf16": r"bfloat16",
    "fp32": r"\.float\(\)|enabled=False|float32",
    "lower_rate": r"\blr\s*[*/]?=",
    "growth_interval": r"growth_interval\s*=",
    "eps": r"\beps\s*=|\+ ?(eps|1e-)",
    "restore": r"scaler\.(load_)?state_dict",
    "zero_grad": r"zero_grad\(",
    "unscale": r"unscale_\(",
    "clip": r"clip_grad_",
}
#: Two of these cannot be so at once.
EXCLUSIVE_REMEDIES = (frozenset({"smaller_scale", "larger_scale"}),)
EXCLUSIVE_CAUSES = tuple(
    map(
        frozenset,
        (
            ("singular_gradient", "backward_overflow"),
            ("singular_gradient", "forward_overflow"),
            ("gradients_not_cleared", "backward_overflow"),
            ("step_outside_scaler", "step_left_out"),
            ("scaler_without_fp16", "forward_overflow"),
            ("scaler_without_fp16", "backward_overflow"),
            ("scaler_without_fp16", "fp16_gradients"),
            ("scaler_without_fp16", "nonfinite_without_scaler"),
            ("nonfinite_without_scaler", "scaler_not_restored"),
            ("nonfinite_without_scaler", "scaled_gradients_clipped"),
            ("nonfinite_without_scaler", "step_outside_scaler"),
            ("nonfinite_without_scaler", "adam_eps_underflow"),
            ("nonfinite_without_scaler", "nonfinite_inputs"),
            ("no_optimizer_step", "step_outside_scaler"),
            ("no_optimizer_step", "step_left_out"),
            ("no_gradient", "no_optimizer_step"),
        ),
    )
)


def list_offered(finding: Finding) -> frozenset[str]:
    """Return the remedies that a finding offers, as words of registry.REMEDIES."""
    found = {NAMES[name] for name in finding.remedies if name in NAMES}
    if finding.module:  # a fork may run it so
        found.add("fp32")
    return (
        frozenset(found) | _in_words(f"{finding.title}\n{finding.text}") | _in_code(_fix(finding))
    )


def _fix(finding: Finding) -> str:
    return str(getattr(finding, "fix", ""))


def _in_words(text: str) -> frozenset[str]:
    found = set()
    for clause in CLAUSES.split(text):
        if not clause or RULED_OUT.search(clause) or not re.search(ASKS, clause, re.IGNORECASE):
            continue
        found |= {name for name, says in WORDS.items() if re.search(says, clause, re.IGNORECASE)}
    return frozenset(found)


def _in_code(fix: str) -> frozenset[str]:
    """Return the remedies in lines of code, without uncommented lines that only show a place."""
    lines = [line for line in fix.splitlines() if line.partition("#")[0].strip()]
    found = set()
    for line in lines:
        code, _, remark = line.partition("#")
        is_change = len(lines) == 1 or bool(remark.strip()) or line.startswith("+")
        found |= {
            name
            for name, does in CODE.items()
            if re.search(does, code) and (is_change or name not in PLACES)
        }
    return frozenset(found)


def contradictions(findings: Iterable[Finding]) -> list[frozenset[str]]:
    """Return pairs of causes or remedies that exclude each other and are shown together."""
    shown = list(findings)
    causes = {str(getattr(each, "cause", "")) for each in shown}
    remedies = frozenset[str]().union(*map(list_offered, shown))
    return [pair for pair in EXCLUSIVE_CAUSES if pair <= causes] + [
        pair for pair in EXCLUSIVE_REMEDIES if pair <= remedies
    ]


def exclusive(causes: Iterable[str]) -> list[frozenset[str]]:
    """Return the pairs among causes that exclude each other."""
    pairs = map(frozenset, combinations(set(causes), 2))
    return [pair for pair in pairs if pair in EXCLUSIVE_CAUSES]
