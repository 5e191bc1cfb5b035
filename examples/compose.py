"""Sampler × negatives × objective: three ways to learn p(y|x) from data with two right answers, y = ±(0.5 − 0.3x).

With actions of one or two dimensions quadrature gives the exact likelihood, so the ways can be compared.
The data's own entropy, which no model can beat, is log 2 + ½ log(2πe·0.05²) = -0.88 nats.
"""

import torch

from cebm import MALA, Langevin, MLPEnergy, run
from cebm.information import Quadrature
from cebm.losses import importance_nll, info_nce
from cebm.negatives import GaussianMixture, Mixture, ShortChains, Uniform


def demonstrations(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Observations and actions; either answer is right, as often as the other."""
    obs = 2 * torch.rand(rows, 1, generator=generator) - 1
    side = 2.0 * torch.randint(2, (rows, 1), generator=generator) - 1
    return obs, side * (0.5 - 0.3 * obs) + 0.05 * torch.randn(rows, 1, generator=generator)


known = Mixture([Uniform(), GaussianMixture((0.1, 0.4))], (0.5, 0.5))
ways = {
    "uniform negatives, InfoNCE": (Uniform(), lambda pos, neg, log_q: info_nce(pos, neg)),
    "known mixture, importance-sampled NLL": (known, importance_nll),
    "ibc chains, InfoNCE": (ShortChains(Langevin("ibc", noise=0.1)), lambda pos, neg, log_q: info_nce(pos, neg)),
}


def learned(name: str, generator: torch.Generator, steps: int = 200) -> MLPEnergy:
    """The energy that one of the ways learns."""
    source, objective = ways[name]
    energy = MLPEnergy(obs_dim=1, act_dim=1, width=64, generator=generator)
    optimiser = torch.optim.Adam(energy.parameters(), lr=5e-3)
    for _ in range(steps):
        obs, actions = demonstrations(128, generator)
        negatives = source.sample(energy, obs, actions, 16, generator)
        positive = energy(obs, actions.unsqueeze(1)).squeeze(1)
        optimiser.zero_grad()
        objective(positive, energy(obs, negatives.actions), negatives.log_q).backward()
        optimiser.step()
    return energy


def main() -> dict[str, tuple[MLPEnergy, float]]:
    """The energies, and their exact negative log-likelihoods on new data."""
    generator, found = torch.Generator().manual_seed(0), {}
    for name in ways:
        energy = learned(name, generator)
        with torch.no_grad():
            nll = float(Quadrature(low=(-1.1,), high=(1.1,)).nll(energy, *demonstrations(1000, generator)).mean())
            start = 2.2 * torch.rand(1, 1000, 1, generator=generator) - 1.1
            samples = run(MALA(steps=200), energy, energy.encode(torch.zeros(1, 1)), start, generator).actions
        print(f"{name}: NLL {nll:.2f} nats, {(samples > 0).float().mean():.0%} of the samples above zero")
        found[name] = energy, nll
    return found


if __name__ == "__main__":
    main()
