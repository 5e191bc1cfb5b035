"""Feed-forward networks as energies, with their input gradient in closed form; their settings; and the marginal and
pair energies that are made of them.
"""

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cebm.arithmetic import product, reduced
from cebm.energies.base import Actions, Context, Energies, EnergyModel, Obs
from cebm.products import linear, linear_for, linear_into
from cebm.spaces import Specification, traced

Init = Literal["normal", "torch"]

# A block of this many floats per activation keeps a step's whole working set in a core's cache.
_BLOCK_FLOATS = 512 * 256
_THRESHOLD = torch.ops.aten.threshold_backward.default


class FeedForwardEnergy(EnergyModel):
    """Abstract: E(x, y) = trunk(W_x x + W_y y + b). The observation's part W_x x + b is the context.

    On a CPU all work runs in blocks of rows that stay in cache. Of the chain's gradients nothing as large as the
    batch is ever written but the results. On other devices a block is the whole batch.
    """

    closed_form = True

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        width: int,
        dropout: float,
        init: Init,
        spectral_norm: bool,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        for name, value, least in (("obs_dim", obs_dim, 0), ("act_dim", act_dim, 1), ("width", width, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.obs_dim, self.act_dim, self.context_dim = obs_dim, act_dim, width
        self.width, self.dropout = width, dropout
        self.first = Linear(obs_dim + act_dim, width, init, spectral_norm, generator)
        self._at_hand = (self.first,)  # a module searches for its parts at every call
        self._laid: tuple[nn.Parameter, int, Tensor] | None = None

    @abstractmethod
    def trunk(self, pre: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
        """Energies from the first layer's output, before its activation."""

    @abstractmethod
    def trunk_and_gradient(
        self, pre: Float[Tensor, "rows width"], scratch: list[Tensor]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows width"]]:
        """Energies and ∂E/∂pre, in closed form. With `scratch` (buffers like `pre`; autograd is off then) it may
        write into these and into `pre`."""

    @abstractmethod
    def trunk_gradient(self, pre: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """The gradient ∂E/∂pre alone, in closed form."""

    @property
    @abstractmethod
    def scratch_buffers(self) -> int:
        """How many buffers `trunk_and_gradient` can use."""

    @property
    @abstractmethod
    def _hidden(self) -> bool:
        """Whether there are hidden layers that may multiply in bfloat16."""

    @property
    def low(self) -> torch.dtype | None:
        """The type in which hidden layers multiply now, where it is not that of the weights."""
        return torch.bfloat16 if self._hidden and reduced() else None

    def encode(self, obs: Obs) -> Context:
        self.check_obs(obs)
        self.power_iterate()
        (first,) = self._at_hand
        return F.linear(obs, first.matrix().narrow(1, 0, self.obs_dim), first.shift())

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        return self.input_energies(context, actions, self._action_matrix())

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        self.check(context, actions)
        return self.input_gradients(context, actions, self._action_matrix())

    def gradients(self, context: Context, actions: Actions) -> Actions:
        self.check(context, actions)
        matrix = self._action_matrix()
        if not self._at_once(actions):
            return self.input_gradients(context, actions, matrix)[1]
        pre = context.unsqueeze(1) + F.linear(actions, matrix)
        return (self.trunk_gradient(pre.flatten(0, 1)).to(matrix.dtype) @ matrix).view_as(actions)

    def input_energies(
        self,
        context: Context,
        inputs: Float[Tensor, "batch samples inputs"],
        matrix: Float[Tensor, "width inputs"],
    ) -> Energies:
        """E = trunk(context + matrix·inputs): `inputs` are the actions, or whole pairs (x, y).

        Autograd keeps the activations that it needs, but what it does with them happens block by block, forward
        and backward. A block is twice as large here, since each also adds a share to the weights' gradients.
        A compiler plans its own memory, and cannot ask for the number of threads.
        """
        batch, samples, _ = inputs.shape
        rows = batch * samples
        if not self._few(rows) and not traced() and inputs.device.type == "cpu":
            rows = 2 * self._block_rows()
        if rows >= batch * samples:
            return self.trunk(context.unsqueeze(1) + F.linear(inputs, matrix))
        tall = max(1, rows // samples)
        bands = []
        for shared, band in zip(context.split(tall), inputs.split(tall), strict=True):
            parts = [self.trunk(shared.unsqueeze(1) + F.linear(part, matrix)) for part in band.split(rows, 1)]
            bands.append(torch.cat(parts, 1))
        return torch.cat(bands)

    def input_gradients(
        self,
        context: Context,
        inputs: Float[Tensor, "batch samples inputs"],
        matrix: Float[Tensor, "width inputs"],
    ) -> tuple[Energies, Float[Tensor, "batch samples inputs"]]:
        """E and ∇E of the same, with respect to `inputs`."""
        batch, samples, _ = inputs.shape
        if self._at_once(inputs):
            pre = context.unsqueeze(1) + F.linear(inputs, matrix)
            energies, gradient = self.trunk_and_gradient(pre.flatten(0, 1), [])
            return energies.view(batch, samples), (gradient.to(matrix.dtype) @ matrix).view_as(inputs)
        block_rows = self._block_rows()
        flat = inputs.reshape(batch * samples, -1)
        energies, gradients = flat.new_empty(len(flat)), torch.empty_like(flat)
        transposed = matrix.t().contiguous()  # in this layout both thin products below are quick
        buffers = self._workspaces(block_rows, flat.dtype)
        for rows, observations in _blocks(batch, samples, block_rows):
            pre, *scratch = [buffer[: rows.stop - rows.start] for buffer in buffers]
            torch.mm(flat[rows], transposed, out=pre)
            shared = context[observations].unsqueeze(1)
            pre.view(len(shared), -1, self.width).add_(shared)
            energies[rows], gradient = self.trunk_and_gradient(pre, scratch)
            gradient = gradient if gradient.dtype == pre.dtype else pre.copy_(gradient)
            gradients[rows] = F.linear(gradient, transposed)
        return energies.view(batch, samples), gradients.view_as(inputs)

    def _workspaces(self, rows: int, dtype: torch.dtype) -> list[Tensor]:
        """For the first layer's result, and what `trunk_and_gradient` can use: in bfloat16 one more, for that result
        as the next layer reads it."""
        scratch = self.scratch_buffers
        if self.low is None or not scratch:
            return _workspace(1 + scratch, rows, self.width, dtype)
        return [
            *_workspace(1, rows, self.width, dtype),
            *_workspace(scratch + 1, rows, self.width, self.low),
        ]

    def _at_once(self, inputs: Tensor) -> bool:
        """Whether the chain's gradients are computed without blocks: where these have no use, and where a few rows take
        less time than the buffers' bookkeeping."""
        rows = inputs.shape[0] * inputs.shape[1]
        if self._few(rows) or torch.is_grad_enabled() or inputs.device.type != "cpu" or traced():
            return True
        return rows <= self._block_rows() // 8

    def _few(self, rows: int) -> bool:
        """Whether so many rows are few for any number of threads, which is quickly known. What a tracer has in place of
        a number is no `int`: nothing may depend on it."""
        return type(rows) is int and 8 * rows * self.width <= _BLOCK_FLOATS

    def _block_rows(self) -> int:
        """Rows of a block of the chain's gradients."""
        return max(1, _BLOCK_FLOATS * torch.get_num_threads() // self.width)

    def power_iterate(self) -> None:
        """Follows the weights with the spectral norms' estimates: once per training batch, and never in a chain."""
        if self.training and torch.is_grad_enabled():
            for layer in self.modules():
                if isinstance(layer, Linear):
                    layer.power_iterate()

    def pairs(self) -> EnergyModel:
        return PairEnergy(self)

    def _action_matrix(self) -> Float[Tensor, "width act"]:
        laid, (first,) = self._laid, self._at_hand
        if laid is not None:  # unless the matrix has moved since, as with a change of dtype
            weight, place, own = laid
            if weight is first._parameters["weight"] and weight.data_ptr() == place and not weight.requires_grad:
                return own
        return first.matrix().narrow(1, self.obs_dim, self.act_dim)

    def lay_out(self) -> None:
        """Keeps the actions' part of the first matrix at hand. Called once for a policy's copy, without gradients."""
        weight = self.first.weight
        if not self.first.spectral_norm:
            self.first.lay_out()
            self._laid = weight, weight.data_ptr(), weight.data.narrow(1, self.obs_dim, self.act_dim)

    def _drop(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden


class MLPEnergy(FeedForwardEnergy):
    """The paper's network: two hidden layers of 256 (three linear maps, one of them 256×256), ReLU.

    Weights and biases start at N(0, 0.05²) ('normal', the paper) or as torch's Linear does ('torch').
    With h₁ = relu(Wx x + Wy y + b₁) and h₂ = relu(W₂h₁ + b₂),
    E = w·h₂ + b and ∇_y E = Wyᵀ (1[h₁>0] ⊙ W₂ᵀ (1[h₂>0] ⊙ w)).
    """

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        width: int = 256,
        hidden_layers: int = 2,
        dropout: float = 0.0,
        init: Init = "normal",
        spectral_norm: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(obs_dim, act_dim, width, dropout, init, spectral_norm, generator)
        if hidden_layers < 1:
            raise ValueError(f"hidden_layers must be at least 1, got {hidden_layers}")
        make = partial(Linear, init=init, spectral_norm=spectral_norm, generator=generator)
        self.hidden = nn.ModuleList(make(width, width, hidden=True) for _ in range(hidden_layers - 1))
        self.last = make(width, 1)
        self._layers = (*linears(self.hidden), self.last)  # at hand: no search in the module at every call

    def trunk(self, pre: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
        if not (self.dropout and self.training):
            return rectified(pre, self._layers).squeeze(-1)
        for layer in self._layers:
            pre = layer.forward(self._drop(torch.relu(pre)))
        return pre.squeeze(-1)

    @property
    def scratch_buffers(self) -> int:
        return len(self._layers)

    @property
    def _hidden(self) -> bool:
        return len(self._layers) > 1

    def trunk_and_gradient(
        self, pre: Float[Tensor, "rows width"], scratch: list[Tensor]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows width"]]:
        relu = torch.relu_ if scratch else torch.relu
        *hidden, last = self._layers
        buffers: list[Tensor | None] = [*scratch] or [None] * self.scratch_buffers
        spare, *outs = buffers[: self.scratch_buffers]
        operands = [layer.operands() for layer in hidden]
        matrices = [matrix for matrix, _ in operands]
        first, half = relu(pre), self.low is not None
        if half:  # from here on; the first layer's own buffer is then free for the products below
            first = scratch[-1].copy_(first) if scratch else first.bfloat16()
        activations = [first]
        for (matrix, bias), out in zip(operands, outs, strict=True):
            activations.append(relu(linear_into(out, activations[-1], matrix, bias)))
        output = last.matrix()[0]
        top = activations.pop()
        # The same as top @ output; but that product may read a row in another core than the one that has it in its
        # cache and writes to it next, which costs more than the product itself.
        if scratch:
            products = torch.mul(top, output, out=pre if half else spare).sum(-1)
        else:
            products = (top * output).sum(-1) if half else top @ output
        energies = products + last.bias
        gradient = _gate(output.to(top.dtype).expand_as(top), top, in_place=bool(scratch))
        while activations:
            below = linear_into(spare, gradient, matrices.pop().t())
            gradient = _gate(below, activations.pop(), in_place=bool(scratch))
        return energies, gradient

    def trunk_gradient(self, pre: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        if self.low is not None:
            return self.trunk_and_gradient(pre, [])[1]
        *hidden, last = self._layers
        times, matrices, activations = linear_for(pre), [], [torch.relu(pre)]
        for layer in hidden:
            matrices.append(layer.matrix())
            activations.append(torch.relu(times(activations[-1], matrices[-1], layer.shift())))
        top = activations.pop()
        gradient = _gate(last.matrix().expand_as(top), top)
        while activations:
            gradient = _gate(times(gradient, matrices.pop().t(), None), activations.pop())
        return gradient


class ResidualEnergy(FeedForwardEnergy):
    """The pre-activation residual network of the IBC reference code: a projection, then blocks
    x ← x + W₂ relu(W₁ relu(x) + b₁) + b₂, then a linear map to the energy (no activation before it)."""

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        width: int = 256,
        blocks: int = 1,
        dropout: float = 0.0,
        init: Init = "normal",
        spectral_norm: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(obs_dim, act_dim, width, dropout, init, spectral_norm, generator)
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}")
        make = partial(Linear, init=init, spectral_norm=spectral_norm, generator=generator)
        self.inner = nn.ModuleList(make(width, width, hidden=True) for _ in range(blocks))
        self.outer = nn.ModuleList(make(width, width, hidden=True) for _ in range(blocks))
        self.last = make(width, 1)

    def trunk(self, pre: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows"]:
        for inner, outer in zip(linears(self.inner), linears(self.outer), strict=True):
            pre = pre + outer(self._drop(torch.relu(inner(self._drop(torch.relu(pre))))))
        return self.last(pre).squeeze(-1)

    @property
    def scratch_buffers(self) -> int:
        return 0

    @property
    def _hidden(self) -> bool:
        return True

    def trunk_and_gradient(
        self, pre: Float[Tensor, "rows width"], scratch: list[Tensor]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows width"]]:
        steps = []
        for inner, outer in zip(linears(self.inner), linears(self.outer), strict=True):
            (matrix_in, bias_in), (matrix_out, bias_out) = inner.operands(), outer.operands()
            outside = torch.relu(pre).to(matrix_in.dtype)
            inside = torch.relu(linear(outside, matrix_in, bias_in))
            pre = pre + linear(inside, matrix_out, bias_out)
            steps.append((outside, matrix_in, inside, matrix_out))
        output = self.last.matrix()[0]
        energies = pre @ output + self.last.bias
        gradient = output.expand_as(pre)
        for outside, matrix_in, inside, matrix_out in reversed(steps):
            below = _gate(linear(gradient.to(matrix_out.dtype), matrix_out.t()), inside)
            gradient = gradient + _gate(linear(below, matrix_in.t()), outside)
        return energies, gradient

    def trunk_gradient(self, pre: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        return self.trunk_and_gradient(pre, [])[1]  # the energies take one of many products


@dataclass(frozen=True)
class MLP:
    """Settings of `MLPEnergy`, the paper's network: E = w · relu(W₂ relu(Wx x + Wy y + b₁) + b₂) + b."""

    width: int = 256
    """Hidden units per layer."""
    hidden_layers: int = 2
    """Hidden layers."""
    dropout: float = 0.0
    """Share of hidden units dropped while training."""
    init: Init = "normal"
    """'normal': weights and biases from N(0, 0.05²) (the paper). 'torch': torch's default."""
    spectral_norm: bool = False
    """Divide each weight matrix by its largest singular value."""

    explicit: ClassVar[bool] = False
    joint: ClassVar[bool] = True

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`."""
        sizes = (spec.obs_dim, spec.act_dim, self.width, self.hidden_layers)
        return MLPEnergy(*sizes, self.dropout, self.init, self.spectral_norm, generator)


@dataclass(frozen=True)
class Residual:
    """Settings of `ResidualEnergy`, the network of the IBC reference code: blocks
    h ← h + W₂ relu(W₁ relu(h) + b₁) + b₂."""

    width: int = 256
    """Hidden units per layer."""
    blocks: int = 2
    """Residual blocks of two layers each."""
    dropout: float = 0.0
    """Share of hidden units dropped while training."""
    init: Init = "normal"
    """'normal': weights and biases from N(0, 0.05²) (the paper). 'torch': torch's default."""
    spectral_norm: bool = False
    """Divide each weight matrix by its largest singular value."""

    explicit: ClassVar[bool] = False
    joint: ClassVar[bool] = True

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`."""
        sizes = (spec.obs_dim, spec.act_dim, self.width, self.blocks)
        return ResidualEnergy(*sizes, self.dropout, self.init, self.spectral_norm, generator)


class MarginalEnergy(EnergyModel):
    """E(y): the same MLP without an observation (64 hidden units in the paper). `encode` reads only the batch size."""

    closed_form = True

    def __init__(
        self, act_dim: int, width: int = 64, hidden_layers: int = 2, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.network = MLPEnergy(0, act_dim, width, hidden_layers, generator=generator)
        self.obs_dim, self.act_dim, self.context_dim = 0, act_dim, self.network.context_dim

    def encode(self, obs: Obs) -> Context:
        return self.network.encode(self.network.first.bias.new_empty(obs.shape[0], 0))

    def energies(self, context: Context, actions: Actions) -> Energies:
        return self.network.energies(context, actions)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        return self.network.energies_and_gradients(context, actions)


class PairEnergy(EnergyModel):
    """E(x, y) read as the energy of p(x, y): no observation, the action is the pair z = (x, y). Run a sampler on it to
    sample observations and actions together. As a conditional energy the network itself serves, since
    p(y|x) ∝ p(x, y)."""

    closed_form = True

    def __init__(self, network: FeedForwardEnergy) -> None:
        super().__init__()
        self.network = network
        self.obs_dim, self.act_dim, self.context_dim = 0, network.obs_dim + network.act_dim, network.width

    def encode(self, obs: Obs) -> Context:
        self.network.power_iterate()
        return self.network.first.bias.expand(obs.shape[0], -1)

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        return self.network.input_energies(context, actions, self.network.first.matrix())

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        self.check(context, actions)
        return self.network.input_gradients(context, actions, self.network.first.matrix())


class Linear(nn.Module):
    """x ↦ W x + b with the paper's or torch's initialisation, drawn from `generator`, and spectral norm on demand.

    Spectral norm divides W by its largest singular value, estimated by power iteration. Only `power_iterate`
    moves the estimate (once per encoded training batch), so that encode and energies see one and the same W.
    """

    left: Tensor
    right: Tensor

    def __init__(
        self,
        inputs: int,
        outputs: int,
        init: Init = "normal",
        spectral_norm: bool = False,
        generator: torch.Generator | None = None,
        hidden: bool = False,
    ) -> None:
        """`hidden`: training may multiply in bfloat16 here, and hands the result on in it."""
        super().__init__()
        self.hidden = hidden
        device = generator.device if generator is not None else None
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, device=device))
        with torch.no_grad():
            for parameter in (self.weight, self.bias):
                if init == "normal":
                    parameter.normal_(0.0, 0.05, generator=generator)
                elif init == "torch":
                    bound = max(inputs, 1) ** -0.5
                    parameter.uniform_(-bound, bound, generator=generator)
                else:
                    raise ValueError(f"init must be 'normal' or 'torch', got {init!r}")
            self.spectral_norm = spectral_norm
            if spectral_norm:
                start = torch.empty(outputs, device=device).normal_(generator=generator)
                self.register_buffer("left", F.normalize(start, dim=0))
                self.register_buffer("right", torch.zeros(inputs, device=device))
                for _ in range(20):
                    self.power_iterate()

    def follow_weights(self) -> None:
        """Averaged weights have spectral norms of their own: called after each update of the average."""
        self.power_iterate()

    @torch.no_grad()
    def power_iterate(self) -> None:
        """u ← Wv/‖Wv‖, v ← Wᵀu/‖Wᵀu‖: one iteration towards the leading singular vectors."""
        if self.spectral_norm:
            self.right = F.normalize(self.weight.t() @ self.left, dim=0)
            self.left = F.normalize(self.weight @ self.right, dim=0)

    def matrix(self) -> Float[Tensor, "outputs inputs"]:
        """W, or W / σ(W)."""
        # From where a module keeps it: finding it as an attribute takes as long as a small operation of torch.
        weight: Tensor = self._parameters["weight"]  # type: ignore[assignment]
        return weight / (self.left @ weight @ self.right) if self.spectral_norm else weight

    def shift(self) -> Float[Tensor, " outputs"]:
        """b, from there too."""
        return self._parameters["bias"]  # type: ignore[return-value]

    def forward(self, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        return product(x, self.matrix(), self._parameters["bias"], self.rounds)

    @property
    def rounds(self) -> bool:
        """Whether this layer multiplies in bfloat16 now."""
        return self.hidden and reduced()

    def operands(self) -> tuple[Float[Tensor, "outputs inputs"], Float[Tensor, " outputs"]]:
        """W and b in the type in which they are multiplied now."""
        matrix, bias = self.matrix(), cast(Tensor, self._parameters["bias"])
        return (matrix.bfloat16(), bias.bfloat16()) if self.rounds else (matrix, bias)

    def lay_out(self) -> None:
        """Keeps W column by column, as its product with few rows reads it: a third quicker for one row or sixteen.
        Called once for a policy's copy, whose weights stay as they are."""
        self.weight.data = self.weight.data.t().contiguous().t()


def rectified(x: Float[Tensor, "*rows inputs"], layers: Sequence[Linear]) -> Float[Tensor, "*rows outputs"]:
    """x through the layers, with a ReLU before each. No calls of the layers: each takes as long as a product of a row
    with a small matrix."""
    if reduced():
        for layer in layers:
            x = layer.forward(torch.relu(x))
        return x
    times = linear_for(x)
    for layer in layers:
        own = layer._parameters
        matrix = layer.matrix() if layer.spectral_norm else own["weight"]
        x = times(torch.relu(x), matrix, own["bias"])  # type: ignore[arg-type]
    return x


def linears(layers: nn.Module | None) -> Iterable[Linear]:
    """The layers of a list of them."""
    return cast(Iterable[Linear], cast(nn.Module, layers)._modules.values())


def _gate(gradient: Tensor, activation: Tensor, in_place: bool = False) -> Tensor:
    """gradient ⊙ 1[activation > 0], the backward of ReLU, in one pass; in place, over `activation`."""
    if in_place:
        return torch.ops.aten.threshold_backward.grad_input(gradient, activation, 0, grad_input=activation)
    return _THRESHOLD(gradient, activation, 0)


class _Kept(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[int, int, int, torch.dtype], list[Tensor]] = {}


_KEPT = _Kept()


def _workspace(count: int, rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Buffers [rows, width] that each thread keeps from call to call: fresh ones would cost page faults every time."""
    kept = _KEPT.buffers
    key = (count, rows, width, dtype)
    if key not in kept:
        if len(kept) >= 8:  # sizes come and go in a study of widths; what is in use stays
            kept.clear()
        with torch.inference_mode(False):
            kept[key] = [torch.empty(rows, width, dtype=dtype) for _ in range(count)]
    return kept[key]


def _blocks(batch: int, samples: int, rows: int) -> Iterator[tuple[slice, slice]]:
    """Cuts the batch × samples rows into runs of at most `rows`, each with the observations that it belongs to:
    several whole observations, or a part of one."""
    tall, wide = max(1, rows // samples), min(samples, rows)
    for i in range(0, batch, tall):
        last = min(i + tall, batch)
        for begin in range(i * samples, last * samples, tall * wide):
            yield slice(begin, min(begin + tall * wide, last * samples)), slice(i, last)
