"""The texts of claim 1, integral."""

from reproduction.intervals import Interval

STATEMENT = (
    "Taking the mean of exp(−E) over samples for the integral Z, as eq. 2 does, is right only for samples of a "
    "uniform proposal."
)
PROTOCOL = (
    "Random energies of two actions: mixtures of four Gaussians with deviations from 0.15 up. For each, the log of "
    "the mean of exp(−E) over 4,096 samples plus the log-volume of the box, against log Z of the box by "
    "quadrature, for uniform samples, for a Gaussian mixture around an action of the density, and for IBC's "
    "Langevin chains."
)
METRIC = "Bias of log Z in nats: the mean error over energies."
RULE = (
    "Holds where the 95 % interval of the bias over seeds reaches into ±0.02 nats for uniform samples, and lies "
    "beyond ±0.1 nats for the other two; does not hold where that of uniform samples lies beyond ±0.1 nats or that "
    "of another source within ±0.02; else inconclusive."
)


COMMENT = (
    "The mean of exp(−E) over samples of q estimates ∫ q exp(−E), which is Z over the volume only where q is "
    "uniform. Chains and mixtures around the demonstration go where exp(−E) is large: their mean is too large."
)


def measured(bias: dict[str, Interval]) -> str:
    """The bias of each source of samples, in nats."""
    told = ", ".join(f"{interval.number()} nats for {name}" for name, interval in bias.items())
    return f"Bias of log Z: {told}."
