"""The texts of claim 17, explicit-parts."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict

STATEMENT = (
    "Leveraging explicit functions improves implicit ones, as the conclusion conjectures: a policy whose energy is "
    "built on an explicit part acts better than that part alone."
)
PROTOCOL = (
    "`steady` tilts a mixture density by a learned energy, `annealed` chooses by its energy among its own draws. Each "
    "trained policy acts in the same 200 held-out episodes as a whole and by its explicit part alone (the mixture; one "
    "draw). Nothing is trained for this claim: it reads the committed records of the stability study "
    "(docs/stability) and of the Push-T study (docs/tasks)."
)
METRIC = (
    "Success on the particle tasks, reward (the largest coverage of an episode) on Push-T; whole minus part, paired by "
    "seed."
)
RULE = (
    "By 95 % intervals over five seeds on every one of the seven tasks. Holds where the whole is better on some task "
    "(the interval lies above 0) and worse on none; does not hold where on every task the upper end of the gain is "
    "below 0.05; else inconclusive. Inconclusive while a task has fewer than five seeds. Written when the particle's "
    "records and one seed of Push-T were known."
)


@dataclass(frozen=True)
class Facts:
    """What the texts report."""

    rows: dict[str, tuple[Interval, Interval, int]]
    """By task: the whole policy, its gain over its explicit part, and the number of seeds."""
    needed: int
    lacking: list[str]
    """Tasks with fewer seeds than a verdict needs."""


def measured(facts: Facts) -> str:
    if not facts.rows:
        return "No record of any task is there yet."
    parts = [_row(name, *row, facts.needed) for name, row in facts.rows.items()]
    return "Gain of the whole over its explicit part: " + "; ".join(parts) + "."


def _row(name: str, whole: Interval, gain: Interval, seeds: int, needed: int) -> str:
    if seeds < 2:
        return f"{name} {gain.mean:+.3f} at {whole.mean:.3f} (one seed, no verdict)"
    told = f"{name} {gain.mean:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}) at {whole.mean:.3f}"
    return told if seeds >= needed else f"{told} ({seeds} seeds, no verdict)"


def comment(facts: Facts, verdict: Verdict) -> str:
    text = _COMMENTS[verdict]
    if facts.lacking:
        text += f" Fewer than {facts.needed} seeds: {', '.join(facts.lacking)}."
    return text


_COMMENTS: dict[Verdict, str] = {
    "holds": "Where the explicit part alone is not right, the learned energy corrects it, and nowhere does it do harm.",
    "does not hold": (
        "On these tasks the explicit part alone is already right: the learned energy changes nothing that counts. That "
        "says nothing about the other direction, in which the explicit part makes the energy trainable."
    ),
    "inconclusive": (
        "Where the explicit part alone is already right, as on the particle, the learned energy changes little; "
        "whether it helps on Push-T, the seeds do not tell yet."
    ),
}
