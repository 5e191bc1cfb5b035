"""A density that is known and can be drawn from, tilted by an energy: the implicit energy of our default recipe."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, EnergySettings, Obs, described
from cebm.energies.density import MixtureDensity
from cebm.energies.feedforward import MLP
from cebm.spaces import Part, Specification

if TYPE_CHECKING:
    from cebm.recipes import Trial


class TiltedEnergy(EnergyModel):
    """E(x, y) = −log q(y|x) + f(x, y): the base q is known and can be drawn from, the tilt f is learned.

    InfoNCE with negatives from q learns f = log q/p + c(x) (ranking NCE, with E in place of f). Then E is −log p up to
    c(x), and f stays as small as q is good: a sharp p asks for large energies of neither the network nor the loss.
    The context is the pair (that of f, that of q).
    """

    def __init__(self, base: EnergyModel, tilt: EnergyModel) -> None:
        super().__init__()
        if base.act_dim != tilt.act_dim or base.obs_dim not in (0, tilt.obs_dim):
            raise ValueError(
                f"the base is of {base.obs_dim} and {base.act_dim} dimensions, the tilt of "
                f"{tilt.obs_dim} and {tilt.act_dim}"
            )
        if not base.proposes:
            raise ValueError(f"the base must be a density that can be drawn from, not {type(base).__name__}")
        self.tilt, self.base = tilt, base
        self._terms = (tilt, base)  # at hand: a module searches for its parts at every call
        self.obs_dim, self.act_dim = tilt.obs_dim, tilt.act_dim
        self.closed_form = tilt.closed_form and base.closed_form

    def encode(self, obs: Obs) -> Context:
        first, second = self._terms
        return first.encode(obs), second.encode(obs)

    def energies(self, context: Context, actions: Actions) -> Energies:
        (tilt, base), (first, second) = self._pair(context), self._terms  # each part checks its own
        return first.energies(tilt, actions) + second.energies(base, actions)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        tilt, base = self._pair(context)
        tilts, slopes = self.tilt.energies_and_gradients(tilt, actions)
        energies, gradients = self.base.energies_and_gradients(base, actions)
        return energies + tilts, gradients + slopes

    def gradients(self, context: Context, actions: Actions) -> Actions:
        (tilt, base), (first, second) = self._pair(context), self._terms
        return second.gradients(base, actions) + first.gradients(tilt, actions)

    def propose(self, context: Context, n: int, generator: torch.Generator, shared: bool = False) -> Actions:
        """Draws of the base q."""
        return self._terms[1].propose(context[1], n, generator, shared)

    def excess(self, context: Context, actions: Actions) -> Energies:
        """E + log q = f, plus the base's own excess, which is 0 where the base draws from itself."""
        (tilt, base), (first, second) = self._pair(context), self._terms
        energies = first.energies(tilt, actions)
        return energies if second.proposes_itself else energies + second.excess(base, actions)

    def check(self, context: Context, actions: Tensor) -> None:
        tilt, base = self._pair(context)
        self.tilt.check(tilt, actions)
        self.base.check(base, actions)

    def _pair(self, context: Context) -> tuple[Context, Context]:
        """The contexts of the tilt and of the base."""
        if not isinstance(context, tuple) or len(context) != 2:
            raise ValueError(f"context must be the pair (of the tilt, of the base), got {described(context)}")
        return context

    @property
    def alone(self) -> EnergyModel | None:
        """The base; None where it sees nothing, as a marginal p(y) is no policy."""
        return self.base if self.base.obs_dim else None

    @property
    def contrasted(self) -> EnergyModel:
        return self.tilt

    def own_losses(self, obs: Obs, actions: Float[Tensor, "batch act"]) -> dict[str, Tensor]:
        """The base is fitted by likelihood; it has weights of its own, so Adam trains the two as if apart."""
        return {"proposal_loss": self.base(obs, actions.unsqueeze(1)).mean()}


@dataclass(frozen=True)
class Tilted:
    """A mixture density tilted by a network: E = f − log q."""

    tilt: EnergySettings = MLP()
    """Settings of the learned energy f."""
    base: EnergySettings = MixtureDensity()
    """Settings of the density q."""
    base_sees: Literal["observation", "nothing"] = "observation"
    """'observation': q(y|x). 'nothing': p̂(y), which puts back the marginal that InfoNCE with marginal negatives
    leaves out."""

    explicit: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.base_sees not in ("observation", "nothing"):
            raise ValueError(f"base_sees must be 'observation' or 'nothing', got {self.base_sees!r}")

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`: first those of f, then those of q."""
        tilt = self.tilt.build(spec, generator)
        if self.base_sees == "nothing":
            spec = Specification((Part("nothing", (0,)),), spec.action, 1, spec.horizon, spec.smoothing)
        return TiltedEnergy(self.base.build(spec, generator), tilt)

    def check_composition(self, trial: "Trial") -> None:
        """The tilt is the log-ratio of where the negatives come from to the data, and q is what is put back: so the
        negatives must come from q."""
        source = getattr(trial.objective, "source", None)
        fitting = ("proposal",) if self.base_sees == "observation" else ("proposal", "marginal")
        given = getattr(source, "distribution", None)
        if not getattr(trial.objective, "density_ratio", False) or given not in fitting:
            what = type(trial.objective).__name__ + ("" if source is None else f" with {type(source).__name__}")
            raise ValueError(
                f"Tilted (base_sees={self.base_sees!r}) does not go with {what}: it needs an objective that learns a "
                f"density ratio (`density_ratio = True`) and a source that says `distribution = "
                f"{' or '.join(map(repr, fitting))}`"
            )
