"""Weighted sums of energies: Σᵢ wᵢ Eᵢ(x, y), a product of experts in densities."""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cebm.energies.base import Actions, Context, Energies, EnergyModel, Level, Obs, described


class WeightedSum(EnergyModel):
    """Σᵢ wᵢ Eᵢ(x, y). A term that ignores the observation (obs_dim 0) can be added to any energy.

    The context is the tuple of the terms' contexts. The first term with a proposal and a positive weight proposes for
    the whole sum, so that `energy + penalty` is searched from where `energy` is. What a term needs in training (losses
    of its own, the demonstrations, a part that contrast trains) it gets in a sum too.
    """

    weights: list[float]

    def __init__(self, terms: list[EnergyModel], weights: list[float]) -> None:
        super().__init__()
        flat: list[tuple[EnergyModel, float]] = []
        for term, weight in zip(terms, weights, strict=True):
            if isinstance(term, WeightedSum):
                flat += [(inner, weight * w) for inner, w in zip(term.parts(), term.weights, strict=True)]
            else:
                flat.append((term, weight))
        self.terms = nn.ModuleList(term for term, _ in flat)
        self.weights = [weight for _, weight in flat]
        if len({term.act_dim for term, _ in flat}) != 1:
            raise ValueError(f"energies of different act_dim do not add: {[term.act_dim for term, _ in flat]}")
        if len({term.obs_dim for term, _ in flat} - {0}) > 1:
            raise ValueError(f"energies of different obs_dim do not add: {[term.obs_dim for term, _ in flat]}")
        self.obs_dim = max(term.obs_dim for term, _ in flat)
        self.act_dim = flat[0][0].act_dim
        self.closed_form = all(term.closed_form for term, _ in flat)
        levelled = next((term for term, _ in flat if term.levels), flat[0][0])
        self.levels, self.deviation = levelled.levels, levelled.deviation
        self.smoothable = len(flat) == 1 and self.weights == [1.0] and flat[0][0].smoothable

    def parts(self) -> Iterator[EnergyModel]:
        """The terms, in the order of `weights`."""
        yield from cast(Iterable[EnergyModel], self.terms)  # a ModuleList does not know the type of its items

    def encode(self, obs: Obs) -> Context:
        return tuple(term.encode(obs) for term in self.parts())

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        return sum(
            (w * term.energies(part, actions) for w, term, part in self._split(context)),
            actions.new_zeros(actions.shape[:2]),
        )

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        self.check(context, actions)
        energies, gradients = actions.new_zeros(actions.shape[:2]), torch.zeros_like(actions)
        for weight, term, part in self._split(context):
            energy, gradient = term.energies_and_gradients(part, actions)
            energies, gradients = energies + weight * energy, gradients + weight * gradient
        return energies, gradients

    def check(self, context: Context, actions: Tensor) -> None:
        if not isinstance(context, tuple) or len(context) != len(self.terms):
            raise ValueError(f"context must be a tuple of {len(self.terms)}, one per term, got {described(context)}")
        for _, term, part in self._split(context):
            term.check(part, actions)

    def at(self, level: Level) -> EnergyModel:
        """The sum of the terms at that level; a term without levels, such as a penalty, is the same at all."""
        terms = [term.at(level) for term in self.parts()]
        same = all(new is old for new, old in zip(terms, self.parts(), strict=True))
        return self if same else WeightedSum(terms, self.weights)

    @property
    def _proposer(self) -> int | None:
        """Which of the terms proposes candidates."""
        pairs = enumerate(zip(self.parts(), self.weights, strict=True))
        return next((i for i, (term, weight) in pairs if term.proposes and weight > 0), None)

    @property
    def proposes(self) -> bool:
        return self._proposer is not None

    @property
    def explicit(self) -> bool:
        """A single term of positive weight has its lowest energy where it had it; a sum of several, elsewhere."""
        return len(self.terms) == 1 and self.weights[0] > 0 and next(self.parts()).explicit

    def best(self, context: Context) -> Float[Tensor, "batch act"]:
        return next(self.parts()).best(context[0]) if self.explicit else super().best(context)

    @property
    def contrasted(self) -> EnergyModel:
        """Σᵢ wᵢEᵢ + log q, as in `excess`: of the term k that knows q, its own part that is contrasted and (wₖ − 1)Eₖ,
        and the other terms."""
        index = self._proposer
        known = None if index is None else list(self.parts())[index]
        if known is None or known.contrasted is known:
            return self
        terms, weights = [known.contrasted], [1.0]
        for place, (weight, term) in enumerate(zip(self.weights, self.parts(), strict=True)):
            rest = weight - 1 if place == index else weight
            if rest:
                terms.append(term)
                weights.append(rest)
        return WeightedSum(terms, weights)

    def own_losses(self, obs: Obs, actions: Float[Tensor, "batch act"]) -> dict[str, Tensor]:
        """Those of all terms. Where two give the same name, that of the later one gets its position in the sum."""
        losses: dict[str, Tensor] = {}
        for index, term in enumerate(self.parts()):
            for name, loss in term.own_losses(obs, actions).items():
                losses[f"{name}_{index}" if name in losses else name] = loss
        return losses

    def remember(self, obs: Float[Tensor, "pairs obs"], actions: Float[Tensor, "pairs act"]) -> None:
        """Hands the demonstrations to the terms that store them."""
        for term in self.parts():
            store = getattr(term, "remember", None)
            if callable(store):
                store(obs, actions)

    def pairs(self) -> EnergyModel:
        return WeightedSum([term.pairs() for term in self.parts()], self.weights)

    def propose(self, context: Context, n: int, generator: torch.Generator, shared: bool = False) -> Actions:
        index = self._proposer
        if index is None:
            raise TypeError("no term of this sum of energies has a proposal to draw from")
        return list(self.parts())[index].propose(context[index], n, generator, shared)

    def excess(self, context: Context, actions: Actions) -> Energies:
        """Σᵢ wᵢEᵢ + log q, with q the proposal of term k: its own excess, (wₖ − 1)Eₖ, and the other terms."""
        proposer = self._proposer
        if proposer is None:
            return self.energies(context, actions)
        self.check(context, actions)
        result = actions.new_zeros(actions.shape[:2])
        for index, (weight, term, part) in enumerate(self._split(context)):
            if index != proposer:
                result = result + weight * term.energies(part, actions)
                continue
            result = result + term.excess(part, actions)
            if weight != 1:
                result = result + (weight - 1) * term.energies(part, actions)
        return result

    def added(self, context: Context, actions: Actions) -> Energies | None:
        found = [w * term.energies(part, actions) for w, term, part in self._split(context) if not term.levels]
        return torch.stack(found).sum(0) if found and self.levels else None

    def _split(self, context: Context) -> Iterator[tuple[float, EnergyModel, Context]]:
        return zip(self.weights, self.parts(), context, strict=True)
