"""Noise-conditional energies: one network that knows the energy of the actions blurred by N(0, s²), for every s.

At a large s the energy is a bowl and at a small one it has the modes of the data, so that candidates which fall from
level to level need few steps. The scaling is Karras' (2022): with d the deviation of the actions and r² = s² + d²,

    E_s(x, y) = |y|²/2r² + D log r − (d/s) φ(x, u, s),  u = y/r,  so that  y − s²∇E_s = (d²/r²) y + (sd/r) ∇_u φ :

φ = 0 is the energy of N(0, d²) at every level, and ∇_u φ has a target of unit size at every level.
"""

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cebm.arithmetic import Precision, check_precision, half_is_faster, reduced, rounding
from cebm.energies.base import (
    Actions,
    Context,
    Energies,
    EnergyModel,
    EnergySettings,
    Level,
    Obs,
    described,
)
from cebm.energies.density import MixtureDensity
from cebm.energies.feedforward import Linear
from cebm.products import linear
from cebm.spaces import Specification, traced

Form = Literal["dot", "affine", "scalar", "half-squared-difference"]
_LADDER = (5.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.04)
"""`levels` of an energy, in units of d: those at which it is shown and checked. It knows all others too."""


class _Gate(torch.autograd.Function):
    """g ⊙ silu'(a). Torch has it in one pass, but without a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(gradient, inputs)
        return torch.ops.aten.silu_backward(gradient, inputs)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor]:
        """silu''(a) = σ'(a) (2 + a (1 − 2σ(a))), with σ' = σ (1 − σ)."""
        gradient, inputs = ctx.saved_tensors
        sigmoid = torch.sigmoid(inputs)
        flat = 1 - sigmoid
        bent = (flat - sigmoid).mul_(inputs).add_(2).mul_(sigmoid).mul_(flat).mul_(gradient).mul_(outer[0])
        return torch.ops.aten.silu_backward(outer[0], inputs), bent


def _gate(gradient: Tensor, inputs: Tensor) -> Tensor:
    if traced():  # silu'(a) = σ(a) (1 + a (1 − σ(a))) by plain arithmetic, which every format of export knows
        sigmoid = torch.sigmoid(inputs)
        return gradient * sigmoid * (1 + inputs * (1 - sigmoid))
    if torch.is_grad_enabled():
        return cast(Tensor, _Gate.apply(gradient, inputs))
    return torch.ops.aten.silu_backward(gradient, inputs)


class Encoder(nn.Module):
    """The observation's work, done once: a residual network of SiLU, x ← x + W₂ silu(W₁ silu(x) + b₁) + b₂, and a
    linear map to what each layer of the head adds."""

    def __init__(self, inputs: int, outputs: int, width: int, blocks: int, generator: torch.Generator | None) -> None:
        super().__init__()
        make = partial(Linear, init="torch", generator=generator)
        self.first = make(inputs, width)
        self.inner = nn.ModuleList(make(width, width) for _ in range(blocks))
        self.outer = nn.ModuleList(make(width, width) for _ in range(blocks))
        self.last = make(width, outputs)

    def forward(self, obs: Obs) -> Float[Tensor, "batch outputs"]:
        hidden = self.first(obs)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            hidden = hidden + outer(F.silu(inner(F.silu(hidden))))
        return self.last(F.silu(hidden))


class Head(nn.Module):
    """φ(u; c) and its gradient ∇_u φ in closed form. With o the output of a residual network of u, whose layers add
    the conditions c, φ is one of

        dot: u·o;  affine: u·o + o₀;  scalar: o₀;  half-squared-difference: ½|u|² − ½|u − o|² = u·o − ½|o|².

    With v = ∂φ/∂o, ∇_u φ = ∂φ/∂u + (∂o/∂u)ᵀ v: one pass forward and one back, both made of the same few operations, so
    that training differentiates them once more and never twice.
    """

    def __init__(self, act_dim: int, width: int, blocks: int, form: Form, generator: torch.Generator | None) -> None:
        super().__init__()
        make = partial(Linear, init="torch", generator=generator)
        self.act_dim, self.width, self.form = act_dim, width, form
        outputs = {"dot": act_dim, "affine": act_dim + 1, "scalar": 1, "half-squared-difference": act_dim}
        if form not in outputs:
            raise ValueError(f"form must be one of {', '.join(map(repr, outputs))}, got {form!r}")
        self.first = make(act_dim, width)
        self.inner = nn.ModuleList(make(width, width) for _ in range(blocks))
        self.outer = nn.ModuleList(make(width, width) for _ in range(blocks))
        self.last = make(width, outputs[form])

    @property
    def conditions(self) -> int:
        """Numbers that an observation and a level add, `width` for the first layer and for each block."""
        return self.width * (1 + len(self.inner))

    def values(self, u: Float[Tensor, "rows act"], conditions: tuple[Tensor, ...]) -> Float[Tensor, " rows"]:
        """φ without its gradient."""
        hidden, _ = self._up(u, conditions)
        return self._phi(u, _applied(self.last, F.silu(hidden)))[0]

    def values_and_gradients(
        self, u: Float[Tensor, "rows act"], conditions: tuple[Tensor, ...]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows act"]]:
        """φ and ∇_u φ."""
        hidden, passed = self._up(u, conditions)
        phi, pull, direct = self._phi(u, _applied(self.last, F.silu(hidden)))
        gradient = _gate(pull @ self.last.weight, hidden)
        for inner, outer, (below, inside) in zip(
            _each(self.inner)[::-1], _each(self.outer)[::-1], reversed(passed), strict=True
        ):
            gated = _gate(linear(gradient, outer.weight.t()), inside)
            gradient = gradient + _gate(linear(gated, inner.weight.t()), below)
        gradient = gradient @ self.first.weight
        return phi, gradient if direct is None else gradient + direct

    def _up(self, u: Tensor, conditions: tuple[Tensor, ...]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The last hidden layer before its activation, and of each block what its two activations had as inputs."""
        hidden, passed = _applied(self.first, u) + conditions[0], []
        for inner, outer, condition in zip(_each(self.inner), _each(self.outer), conditions[1:], strict=True):
            inside = _applied(inner, F.silu(hidden)) + condition
            passed.append((hidden, inside))
            hidden = hidden + _applied(outer, F.silu(inside))
        return hidden, passed

    def _phi(self, u: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """φ, ∂φ/∂o and ∂φ/∂u (None where that is 0)."""
        if self.form == "scalar":
            return out[:, 0], torch.ones_like(out), None
        if self.form == "affine":
            shift, slope = out[:, 0], out[:, 1:]
            return (u * slope).sum(-1) + shift, F.pad(u, (1, 0), value=1.0), slope
        products = (u * out).sum(-1)
        if self.form == "dot":
            return products, u, out
        return products - 0.5 * out.square().sum(-1), u - out, out


class _Precision(nn.Module):
    """Whether training multiplies in bfloat16. What was measured is a buffer, so that a run which is resumed does not
    measure again: it would not go on bit for bit."""

    decision: Tensor

    def __init__(self, wanted: Precision) -> None:
        super().__init__()
        self.known: bool | None = {"float32": False, "bf16": True, "measured": None}[wanted]
        if wanted == "measured":
            self.register_buffer("decision", torch.tensor(-1))
            self.register_load_state_dict_post_hook(lambda module, _: module.forget())

    def forget(self) -> None:
        """The buffer was loaded: it is looked at again."""
        self.known = None

    def is_half(self, device: torch.device) -> bool:
        """Looks at the buffer, or measures, once."""
        if self.known is None:
            if int(self.decision) < 0:
                self.decision.fill_(int(half_is_faster(device)))
            self.known = bool(self.decision)
        return self.known


class NoiseConditionalEnergy(EnergyModel):
    """E_s(x, y) at every level s; see the module. `energies` without `at` are those at `level · d`.

    With a `base` density q, E_s = −log q_s(y|x) − (d/s) φ, with q_s = q ∗ N(0, s²) the base at that level: the
    network then learns only what the base leaves over. The base learns by likelihood alone, and φ by the objective.
    The context is the head's conditions, or the pair (conditions, context of the base).
    """

    frequencies: Tensor

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        deviation: float = 0.5,
        level: float = 0.2,
        encoder: tuple[int, int] = (512, 2),
        head: tuple[int, int] = (256, 2),
        form: Form = "dot",
        precision: Precision = "float32",
        base: EnergyModel | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if base is not None and (base.act_dim != act_dim or base.obs_dim != obs_dim or not base.smoothable):
            raise ValueError(
                f"base must be a density of {obs_dim} and {act_dim} dimensions that can be blurred "
                f"(`smoothable`), not {type(base).__name__} of {base.obs_dim} and {base.act_dim}"
            )
        self.obs_dim, self.act_dim, self.deviation = obs_dim, act_dim, deviation
        self.level: Level = level * deviation
        self.levels = tuple(deviation * share for share in _LADDER)
        self.precision = _Precision(precision)
        self.closed_form = base is None or base.closed_form
        self.head = Head(act_dim, *head, form, generator)
        self.encoder = Encoder(obs_dim, self.head.conditions, *encoder, generator)
        # log(s/d)/4 lies between −1.5 and 1: these waves tell a tenth of a level from the next.
        self.register_buffer("frequencies", 2 * math.pi * 2 ** torch.linspace(-2, 2, 16))
        self.noise = Linear(33, self.head.conditions, "torch", generator=generator)
        self.base = base

    def encode(self, obs: Obs) -> Context:
        self.check_obs(obs)
        with self._cast(obs):
            conditions = self.encoder(obs)
        if self.base is None:
            return conditions.to(obs.dtype)
        with torch.no_grad():
            return conditions.to(obs.dtype), self.base.encode(obs)

    def at(self, level: Level) -> "NoiseConditionalEnergy":
        """The energy at a level, or at one level per sample, [batch, samples]. It shares the weights."""
        if isinstance(level, float | int) and not 0 < level < math.inf:
            raise ValueError(f"level must be positive and finite, got {level}")
        other = copy.copy(self)
        other.level = level
        return other

    def energies(self, context: Context, actions: Actions) -> Energies:
        return self._evaluate(context, actions, slopes=False)[0]

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        """∇E_s = y/r² − (d/sr) ∇_u φ; with a base, −∇log q_s in place of y/r²."""
        energies, gradients = self._evaluate(context, actions, slopes=True)
        if gradients is None:
            raise TypeError("gradients were asked for")
        return energies, gradients

    def _evaluate(self, context: Context, actions: Actions, slopes: bool) -> tuple[Energies, Actions | None]:
        self.check(context, actions)
        level = self._levels_of(actions)
        radius = (level.square() + self.deviation**2).sqrt()
        u = (actions / radius).flatten(0, 1)
        given = context if self.base is None else context[0]
        with self._cast(actions):
            conditions = self._conditions(given, level, actions.shape[1])
            if slopes:
                phi, gradient = self.head.values_and_gradients(u, conditions)
            else:
                phi, gradient = self.head.values(u, conditions), None
        phi = phi.to(actions.dtype).view(actions.shape[:2])
        share = self.deviation / level
        prior, pull = self._prior(context, actions, level, radius, slopes)
        energies = prior - share.squeeze(-1) * phi
        if gradient is None or pull is None:
            return energies, None
        return energies, pull - share / radius * gradient.to(actions.dtype).view_as(actions)

    def _prior(
        self, context: Context, actions: Actions, level: Tensor, radius: Tensor, slopes: bool
    ) -> tuple[Tensor, Tensor | None]:
        """−log q_s and its gradient: of the base, or of N(0, d²) without its constant."""
        if self.base is not None:
            base = self.base.at(level.squeeze(-1) if level.numel() > 1 else self.level)
            if slopes:
                return base.energies_and_gradients(context[1], actions)
            return base.energies(context[1], actions), None
        pull = actions / radius.square()
        return 0.5 * (actions * pull).sum(-1) + self.act_dim * radius.log().squeeze(-1), pull

    def _levels_of(self, actions: Actions) -> Float[Tensor, "#batch #samples 1"]:
        level = self.level
        if isinstance(level, Tensor):
            if level.ndim != 2 or any(n not in (1, m) for n, m in zip(level.shape, actions.shape, strict=False)):
                raise ValueError(f"level must be a number or {tuple(actions.shape[:2])}, got {tuple(level.shape)}")
            return level.to(actions).unsqueeze(-1)
        return torch.full((1, 1, 1), level, dtype=actions.dtype, device=actions.device)

    def _conditions(self, given: Tensor, level: Tensor, samples: int) -> tuple[Tensor, ...]:
        """What each layer adds, [rows or 1, width]: the observation's part and the level's, by Fourier features."""
        place = (level / self.deviation).log() / 4
        waves = place * self.frequencies.to(place)
        features = torch.cat([place, waves.sin(), waves.cos()], -1)
        if given.shape[0] == 1 and level.numel() == 1:  # one row for all samples
            return (given + self.noise(features[0])).split(self.head.width, -1)
        parts = given.unsqueeze(1) + self.noise(features)
        parts = parts.expand(-1, samples, -1).flatten(0, 1)
        return parts.split(self.head.width, -1)

    def _cast(self, values: Tensor) -> Any:
        """Products in bfloat16 while training, where that is asked for: acting and its energies stay in float32."""
        learning = self.training and torch.is_grad_enabled()
        if not (reduced() or (learning and self.precision.is_half(values.device))):
            return nullcontext()
        return rounding(values.device)

    def check(self, context: Context, actions: Tensor) -> None:
        if self.base is not None and (not isinstance(context, tuple) or len(context) != 2):
            raise ValueError(f"context must be the pair (conditions, of the base), got {described(context)}")
        conditions = context if self.base is None else context[0]
        fits = isinstance(conditions, Tensor) and conditions.ndim == 2
        if not fits or conditions.shape[1] != self.head.conditions:
            raise ValueError(f"context must be [batch, {self.head.conditions}], got {described(conditions)}")
        super().check(conditions, actions)

    @property
    def alone(self) -> EnergyModel | None:
        """The base density, where there is one."""
        return self.base

    def own_losses(self, obs: Obs, actions: Float[Tensor, "batch act"]) -> dict[str, Tensor]:
        """The base is fitted by likelihood; it has weights of its own, so Adam trains the two as if apart."""
        return {} if self.base is None else {"base_loss": self.base(obs, actions.unsqueeze(1)).mean()}


def _each(layers: nn.ModuleList) -> list[Linear]:
    return cast(list[Linear], list(layers))


def _applied(layer: Linear, values: Tensor) -> Tensor:
    """The layer without a module's call around it, which is a tenth of the time of a few rows."""
    return linear(values, layer.weight, layer.bias)


@dataclass(frozen=True)
class NoiseConditional:
    """Settings of `NoiseConditionalEnergy`: an energy E_s(x, y) at every noise level s."""

    deviation: float = 0.5
    """d, the deviation of normalised actions, in units of which all levels are counted."""
    level: float = 0.2
    """Level of `energies` where none is asked for, in units of d."""
    width: int = 256
    """Hidden units per layer of the head, which sees action and level."""
    blocks: int = 2
    """Residual blocks of the head."""
    encoder_width: int = 512
    """Hidden units per layer of the encoder, which sees the observation."""
    encoder_blocks: int = 2
    """Residual blocks of the encoder."""
    form: Form = "dot"
    """φ from the head's output o: 'dot' u·o, 'affine' u·o + o₀, 'scalar' o₀, 'half-squared-difference' u·o − ½|o|²."""
    precision: Precision = "float32"
    """'bf16': training multiplies in bfloat16, which is faster on a processor that has it. 'measured': where that is
    faster, as measured at the first step; a resumed run keeps to it."""

    explicit: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("deviation", "level"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name, least in (("width", 1), ("blocks", 0), ("encoder_width", 1), ("encoder_blocks", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        check_precision(self.precision)
        if self.form not in ("dot", "affine", "scalar", "half-squared-difference"):
            raise ValueError(f"form must be 'dot', 'affine', 'scalar' or 'half-squared-difference', got {self.form!r}")

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`."""
        return self.built(spec, generator, None)

    def built(self, spec: Specification, generator: torch.Generator | None, base: EnergyModel | None) -> EnergyModel:
        """The same around a base."""
        return NoiseConditionalEnergy(
            spec.obs_dim,
            spec.act_dim,
            self.deviation,
            self.level,
            (self.encoder_width, self.encoder_blocks),
            (self.width, self.blocks),
            self.form,
            self.precision,
            base,
            generator,
        )


@dataclass(frozen=True)
class NoiseConditionalTilt:
    """A density blurred to every level in closed form, and a noise-conditional network for what it leaves over:
    E_s = −log q_s(y|x) − (d/s) φ, with q_s = q ∗ N(0, s²)."""

    tilt: NoiseConditional = NoiseConditional()
    """Settings of the network."""
    base: EnergySettings = MixtureDensity()
    """Settings of the density q, which must be one that can be blurred (`smoothable`)."""

    explicit: ClassVar[bool] = False

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`: first those of the base, then those of the network."""
        return self.tilt.built(spec, generator, self.base.build(spec, generator))
