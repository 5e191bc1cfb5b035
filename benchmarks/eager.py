"""The training step of the trial `ibc` as public PyTorch ports of Implicit Behavioral Cloning write it, to compare
with: the observation repeated beside every sample, whole-batch tensors, the chain's gradient from autograd. With
`compiled`, torch.compile makes one function of that gradient, and one of the loss. Same network, chain and loss as
the library's; only the way to compute them differs.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EagerStep:
    """One step of InfoNCE with Langevin negatives; actions are normalised to [-1, 1]."""

    def __init__(
        self, obs_dim: int, act_dim: int, width: int = 256, samples: int = 8, steps: int = 10, compiled: bool = False
    ) -> None:
        self.act_dim, self.samples, self.steps = act_dim, samples, steps
        self.network = nn.Sequential(
            nn.Linear(obs_dim + act_dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        for parameter in self.network.parameters():
            nn.init.normal_(parameter, 0.0, 0.05)
        self.optimiser = torch.optim.Adam(self.network.parameters(), 1e-3)
        if compiled:
            # Of the parameters' gradients the compiled function knows nothing: they would be half as much work again.
            total = torch.func.grad(lambda actions, obs: self.energies(obs, actions).sum())
            self._gradient = torch.compile(total)
            self._loss = torch.compile(self.loss)
        else:
            self._gradient, self._loss = self.gradient, self.loss

    def energies(self, obs: Tensor, actions: Tensor) -> Tensor:
        """E(x, y) for obs [batch, obs] and actions [batch, samples, act]."""
        repeated = obs.unsqueeze(1).expand(-1, actions.shape[1], -1)
        return self.network(torch.cat([repeated, actions], -1)).squeeze(-1)

    def gradient(self, actions: Tensor, obs: Tensor) -> Tensor:
        """∇_y E."""
        with torch.enable_grad():
            actions = actions.detach().requires_grad_()
            return torch.autograd.grad(self.energies(obs, actions).sum(), actions)[0]

    @torch.no_grad()
    def negatives(self, obs: Tensor, start: Tensor, generator: torch.Generator) -> Tensor:
        """y' = y − (λ/2)∇E + 0.1 λω; λ falls from 1 to 0.001, a step is at most 0.5 long and stays within ±1.1."""
        actions = start
        for k in range(self.steps):
            size = 0.999 * (1 - k / (self.steps - 1)) ** 2 + 0.001
            gradient = self._gradient(actions, obs)
            noise = torch.randn(actions.shape, generator=generator)
            move = (size * (0.1 * noise - 0.5 * gradient)).clamp(-0.5, 0.5)
            actions = (actions + move).clamp(-1.1, 1.1)
        return actions

    def loss(self, obs: Tensor, candidates: Tensor) -> Tensor:
        """InfoNCE: which of the candidates [batch, 1 + samples, act] is the demonstrated one? It is the first."""
        first = torch.zeros(len(obs), dtype=torch.long)
        return F.cross_entropy(-self.energies(obs, candidates), first)

    def step(self, obs: Tensor, actions: Tensor, generator: torch.Generator) -> Tensor:
        """One optimiser step on a batch; the loss."""
        start = torch.rand(len(obs), self.samples, self.act_dim, generator=generator) * 2.2 - 1.1
        candidates = torch.cat([actions.unsqueeze(1), self.negatives(obs, start, generator)], 1)
        self.optimiser.zero_grad(set_to_none=True)
        loss = self._loss(obs, candidates)
        loss.backward()
        self.optimiser.step()
        return loss.detach()
