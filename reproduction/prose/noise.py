"""The texts of claim 4, noise."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict, percent

STATEMENT = (
    "The smaller the noise scale σ of IBC's training chains, the nearer its negatives are to the demonstrated "
    "actions, the lower is the entropy of the learned p(y|x), and the higher its mutual information."
)
PROTOCOL = (
    "`ibc` on the 2-D particle task with σ of 1, 0.3, 0.1 (the plain trial), 0.03 and 0.01 in training and nothing "
    "else changed; acting keeps its σ of 0.01. Distances are the mean over the second half of training; entropy "
    "and information are those of the last policy's energy at 64 validation observations, by quadrature."
)
METRIC = (
    "Per seed, the least-squares slope over log10 σ: of the distance ‖ỹ − y‖ (normalised, a range of 2), of "
    "H(y|x), and of −I(x; y), in nats; all three should be positive. Success is reported and does not decide, as "
    "the paper found a small σ useful for some tasks only."
)
RULE = (
    "A part holds where the 95 % interval of its slope lies above what counts as a change per factor of ten, 0.01 "
    "for the distance and 0.05 nats for the other two; it does not hold where the interval lies below that; else "
    "it is inconclusive. Information does not decide where its mean at σ = 1 is within 0.3 nats of the ceiling "
    "log 64 of what 64 observations can tell (at σ = 0.1, measured before this was written, it is): then the "
    "entropy stands for it, as I = H(y) − H(y|x). The claim holds where all deciding parts hold, does not hold "
    "where one does not, else it is inconclusive."
)


@dataclass(frozen=True)
class Growth:
    """What the texts report if σ matters early in training and not later."""

    away: dict[float, float]
    """Distance of the negatives in the first fifth of training, by σ."""
    flat: bool
    """Whether σ hardly matters below 0.1."""
    norm: Interval
    """Norm of the energy's gradient at the end of training with σ = 1."""
    clipped: list[float]
    """Shares of clipped moves at the end of training with σ = 1."""


@dataclass(frozen=True)
class Facts:
    """What the texts report; quantities are distance, entropy, information and success."""

    first: dict[str, float]
    """Mean of each quantity with the largest σ."""
    last: dict[str, float]
    """Mean of each quantity with the smallest σ."""
    slopes: dict[str, Interval]
    """Change of each quantity with a tenth of σ."""
    parts: dict[str, Verdict]
    saturated: bool
    """Whether the information is at its ceiling, and does not decide."""
    early_slope: Interval
    """Slope of the distance in the first fifth of training."""
    growth: Growth | None
    coarse: float
    """Largest share of observations, over the runs, whose valleys are too narrow for the quadrature."""


def measured(facts: Facts) -> str:
    first, last, slopes = facts.first, facts.last, facts.slopes
    return (
        f"From σ = 1 to σ = 0.01 the distance goes from {first['distance']:.3f} to {last['distance']:.3f}, H(y|x) "
        f"from {first['entropy']:.2f} to {last['entropy']:.2f} nats, I(x; y) from {first['information']:.2f} to "
        f"{last['information']:.2f} nats and success from {100 * first['success']:.1f} to "
        f"{100 * last['success']:.1f} %. A tenth of σ lowers the distance by {slopes['distance'].number()} and "
        f"H(y|x) by {slopes['entropy'].number()} nats, and raises I(x; y) by {slopes['information'].number()} nats "
        f"and success by {slopes['success'].points()} ({', '.join(f'{p}: {v}' for p, v in facts.parts.items())}"
        + (", information: at its ceiling)." if facts.saturated else ").")
        + f" In the first fifth of training a tenth of σ lowers the distance by {facts.early_slope.number()}."
    )


def comment(facts: Facts) -> str:
    return (
        " ".join(_COMMENTS[part, found] for part, found in facts.parts.items())
        + (_grown(facts.growth) if facts.growth else "")
        + (
            " Information is at the ceiling of what 64 observations can tell, and says nothing."
            if facts.saturated
            else ""
        )
        + (
            f" In some run the valleys of {100 * facts.coarse:.0f} % of the observations are too narrow for the "
            "quadrature's nodes, and their entropy is uncertain."
            if facts.coarse > 0
            else " All valleys are wide enough for the quadrature's nodes."
        )
    )


def _grown(growth: Growth) -> str:
    """Why the distances depend on σ early in training, and not later."""
    away = growth.away
    return (
        " In the first fifth of training, which was looked at when the runs had been seen and decides nothing, less "
        f"noise does give nearer negatives: they are {away[1.0]:.3f} away with σ = 1, {away[0.1]:.3f} with 0.1 and "
        f"{away[0.01]:.3f} with 0.01"
        + (", so that below 0.1 hardly anything changes." if growth.flat else ".")
        + " Then the energies grow, and the noise σω counts less beside the gradient ½∇E in the same step: even with "
        f"σ = 1 the gradient has a norm of {growth.norm.number()} at the end of training, and "
        f"{percent(growth.clipped)} of the moves are clipped."
    )


_COMMENTS: dict[tuple[str, Verdict], str] = {
    ("distance", "holds"): (
        "With little noise a chain is gradient descent, and more of the negatives end in the valley of the "
        "demonstrated action."
    ),
    ("distance", "does not hold"): "How near the negatives end does not depend on σ by what would count.",
    ("distance", "inconclusive"): "How near the negatives end changes no more with σ than these seeds can tell.",
    ("entropy", "holds"): "The valleys get narrower with less noise, as InfoNCE must raise the energy beside them.",
    ("entropy", "does not hold"): "The valleys do not get narrower with less noise: other things decide their depth.",
    ("entropy", "inconclusive"): "Whether the valleys get narrower with less noise, these seeds do not tell.",
    ("information", "holds"): "Narrower valleys in the right places are more information.",
    ("information", "does not hold"): "More information it is not: a narrow valley also has to be in the right place.",
    ("information", "inconclusive"): "Whether it is more information, these seeds do not tell.",
}
