"""The texts of claim 2, langevin."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict, percent

STATEMENT = "IBC's Langevin step, with σ = 1, does not sample the distribution of its energy; the correct step does."
PROTOCOL = (
    "The certificate's three targets with known moments and without a border: the paper's Gaussian, a skewed one "
    "and a double well. On each, both steps run without clipping, with the same drift (τ = λ/2) and the paper's "
    "schedule of λ, from 0.005 to 0.001 (double well: 0.012 to 0.003): 1,000 independent chains of 50 to 500 "
    "steps, whose last states count, and the paper's single chain of 4,000 steps, whose last 1,000 states count "
    "(64 replicas tell its sampling error)."
)
METRIC = (
    "The verdict of the certificate, which tests mean, standard deviation and temperature beyond a tolerance of "
    "0.1, 0.1 and 0.2 at the level of 4.5 standard deviations; and the effective temperature E[(y − μ)·∇E]/d of "
    "the 1,000 chains, which is 1 for samples of exp(−E)."
)
RULE = (
    "Holds where, on every target and for both kinds of run, all seeds certify that the correct step samples the "
    "target and that IBC's does not, and on every target the 95 % interval of the temperature lies below 0.5 for "
    "IBC's step and reaches into 0.8 to 1.2 for the correct one. Does not hold where, on some target, more than "
    "half of the seeds find the correct step at fault or IBC's without fault in some run, or the interval lies "
    "outside of 0.8 to 1.2 for the correct step or above 0.5 for IBC's. Else inconclusive."
)


@dataclass(frozen=True)
class Facts:
    """What the texts report."""

    temperature: dict[str, dict[str, Interval]]
    """Effective temperature by step rule (`ibc`, `correct`) and target."""
    certified: list[float]
    """Share of seeds whose certificate accepts the correct step, by target and run."""
    refused: list[float]
    """Share of seeds whose certificate refuses IBC's step, by target and run."""


def measured(facts: Facts) -> str:
    ibc, correct = facts.temperature["ibc"], facts.temperature["correct"]
    told = "; ".join(
        f"{target}: {ibc[target].number()} with IBC's step, {correct[target].number()} with the correct one"
        for target in ibc
    )
    return (
        f"Effective temperature, {told}. Certified in {percent(facts.certified)} of the runs of "
        f"the correct step, refused in {percent(facts.refused)} of those of IBC's."
    )


def comment(verdict: Verdict) -> str:
    return (
        "On a Gaussian both steps are linear autoregressions, so theory knows the temperature: 1 up to O(τ) for "
        "the correct one, λσ² for IBC's, which at the step sizes of the figure is some thousandths. What the "
        "Gaussian's 50 steps have beyond that is left of their start, of which they forget all but a hundredth."
        + ("" if verdict == "holds" else " These runs do not show it, or not clearly.")
    )
