"""Compositions: pieces are built, found, listed and varied without any of them being known by name."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from cebm.acting import Direct, Search
from cebm.composition import built, modules_in, settings_of, vary, walk
from cebm.energies import MLP, MixtureDensity, Residual, Tilted
from cebm.negatives import (
    InBatch,
    MarginalActions,
    MarginalActionSampler,
    Mixture,
    Replay,
    ReplayBuffer,
    ShortChains,
    Uniform,
)
from cebm.objectives import MCMC, GradientPenalty, InfoNCE, Likelihood, PositiveL2
from cebm.optimisers import Adam
from cebm.recipes import TRIALS, Trial
from cebm.samplers import MALA, Constant, Langevin
from cebm.spaces import Specification

SPEC = Specification.flat(3, 2)
PENALISED = Trial(penalties=(PositiveL2(0.5), GradientPenalty(2.0, 3.0)))


@dataclass(frozen=True)
class Leaf:
    """A user's settings that build a module."""

    size: int = 2

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> nn.Module:
        return nn.Linear(spec.obs_dim, self.size)


@dataclass(frozen=True)
class Branch:
    """A user's piece without a `build`: it has a piece, a tuple of pieces, plain settings, and what it derives."""

    leaf: Any = Leaf()
    leaves: tuple[Any, ...] = ()
    weight: float = 1.0
    names: tuple[str, ...] = ("a", "b")
    double: float = field(init=False)

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight must not be negative, got {self.weight}")
        object.__setattr__(self, "double", 2 * self.weight)


# ---------------------------------------------------------------------------------------------- built


def test_built_makes_what_has_a_build_and_leaves_the_rest(generator: torch.Generator) -> None:
    branch = Branch(Leaf(4), (Leaf(5), Uniform(), Branch(Leaf(6))), weight=3.0)
    result = built(branch, SPEC, generator)
    assert [result.leaf.out_features, result.leaves[0].out_features, result.leaves[2].leaf.out_features] == [4, 5, 6]
    assert isinstance(result, Branch) and result.leaves[1] is branch.leaves[1]
    assert (result.weight, result.double, result.names) == (3.0, 6.0, ("a", "b"))
    assert branch.leaf == Leaf(4), "the settings are as they were"


@pytest.mark.parametrize("piece", [InfoNCE(Uniform()), Branch(Uniform()), (Uniform(), 3), [InBatch()], 3, "text", None])
def test_what_needs_no_building_is_itself(piece: Any, generator: torch.Generator) -> None:
    assert built(piece, SPEC, generator) is piece


def test_an_objective_needs_no_build_of_its_own(generator: torch.Generator) -> None:
    objective = MCMC(Mixture((Uniform(), Replay(capacity=7), MarginalActions(width=5)), (0.5, 0.25, 0.25)), 4)
    result = built(objective, SPEC, generator)
    assert isinstance(result, MCMC) and result.count == 4
    uniform, replay, marginal = result.source.sources
    assert uniform is objective.source.sources[0]
    assert isinstance(replay, ReplayBuffer) and replay.stored.shape == (7, 2)
    assert isinstance(marginal, MarginalActionSampler) and marginal.marginal.network.width == 5


def test_a_start_inside_a_source_is_built_too(generator: torch.Generator) -> None:
    """Of chains, and of a source that builds itself."""
    obs, actions = torch.zeros(4, 3), torch.zeros(4, 2)
    energy = MLP(8).build(SPEC, generator)
    for source in (ShortChains(start=Replay(capacity=9)), MarginalActions(start=Replay(capacity=9))):
        made = built(source, SPEC, generator)
        assert isinstance(made.start, ReplayBuffer)
        assert made.sample(energy, obs, actions, 2, generator).actions.shape == (4, 2, 2)
        assert int(made.start.count) == 8


def test_weights_come_from_the_generator() -> None:
    first, same, other = (
        built(InfoNCE(MarginalActions(width=5)), SPEC, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    weights = [objective.source.marginal.network.first.weight for objective in (first, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


# ---------------------------------------------------------------------------------------------- modules_in


def test_modules_are_found_by_their_path(generator: torch.Generator) -> None:
    result = built(Branch(Leaf(4), (Leaf(5), Uniform(), Branch(Leaf(6)))), SPEC, generator)
    found = modules_in(result)
    assert list(found) == ["leaf", "leaves-0", "leaves-2-leaf"]
    assert found["leaves-2-leaf"] is result.leaves[2].leaf
    assert modules_in(InfoNCE(Uniform())) == modules_in(3) == modules_in(None) == {}


def test_paths_of_modules_are_names_of_modules(generator: torch.Generator) -> None:
    """torch refuses an empty name and one with a dot."""
    for piece in (nn.Linear(1, 1), built(Branch(Leaf(), (Leaf(),)), SPEC, generator)):
        assert len(nn.ModuleDict(modules_in(piece))) == len(modules_in(piece)) > 0


# ---------------------------------------------------------------------------------------------- walk, settings_of


def test_walk_visits_every_piece_from_the_outside_in() -> None:
    paths = [path for path, _ in walk(PENALISED)]
    assert paths[:4] == ["", "energy", "objective", "objective.source"]
    assert {"objective.source.sampler.schedule", "objective.source.start", "penalties.0", "penalties.1"} <= set(paths)
    assert dict(walk(PENALISED))["penalties.1"] == GradientPenalty(2.0, 3.0)
    assert len(paths) == len(set(paths))
    assert all(piece is _at(PENALISED, path) for path, piece in walk(PENALISED))
    assert list(walk(3)) == list(walk(("a", "b"))) == list(walk(Leaf)) == []


def _at(piece: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        piece = piece[int(name)] if isinstance(piece, tuple | list) else getattr(piece, name)
    return piece


@pytest.mark.parametrize("name", TRIALS)
def test_settings_are_all_that_is_no_piece(name: str) -> None:
    """Each can be read by its path and set to what it is."""
    settings = settings_of(TRIALS[name])
    for path, value in settings.items():
        assert _at(TRIALS[name], path) == value
    assert not any(list(walk(value)) for value in settings.values())
    assert vary(TRIALS[name], **settings) == TRIALS[name]


def test_settings_of_a_composition() -> None:
    assert settings_of(Branch(Leaf(4), (Leaf(5),))) == {
        "weight": 1.0,
        "names": ("a", "b"),
        "leaf.size": 4,
        "leaves.0.size": 5,
    }
    assert settings_of(Direct()) == {}
    assert settings_of(PENALISED)["penalties.1.margin"] == 3.0


# ---------------------------------------------------------------------------------------------- vary


def test_a_name_that_one_piece_has_is_enough() -> None:
    assert vary(PENALISED, history=3) == replace(PENALISED, inputs=replace(PENALISED.inputs, history=3))
    assert vary(PENALISED, learning_rate=0.1).optimiser == Adam(0.1)
    assert vary(PENALISED, choice="draw").acting == Search(choice="draw")
    assert vary(Branch(leaves=(Leaf(5),)), **{"leaves.0.size": 6}).leaves == (Leaf(6),)


def test_a_dotted_path_says_which() -> None:
    varied = vary(PENALISED, **{"acting.sampler.steps": 3, "objective.source.sampler.schedule.final": 0.5})
    assert varied.acting.sampler.steps == 3 and varied.objective.source.sampler.steps == 10
    assert varied.objective.source.sampler.schedule.final == 0.5
    assert varied.acting.sampler.schedule == PENALISED.acting.sampler.schedule


def test_the_end_of_a_path_is_enough() -> None:
    assert vary(PENALISED, **{"source.sampler.steps": 4}).objective.source.sampler.steps == 4
    assert vary(PENALISED, **{"1.margin": 5.0}).penalties[1] == GradientPenalty(2.0, 5.0)


def test_pieces_of_a_tuple_are_numbered() -> None:
    assert vary(PENALISED, **{"penalties.0.weight": 4.0}).penalties == (PositiveL2(4.0), GradientPenalty(2.0, 3.0))
    assert vary(PENALISED, **{"penalties.1": PositiveL2(9.0)}).penalties == (PositiveL2(0.5), PositiveL2(9.0))
    mixed = Trial(objective=InfoNCE(Mixture((Uniform(), ShortChains()), (0.5, 0.5))))
    assert vary(mixed, **{"sources.1.sampler.steps": 2}).objective.source.sources[1].sampler.steps == 2


def test_whole_pieces_vary_too() -> None:
    assert vary(PENALISED, energy=Residual()).energy == Residual()
    assert vary(PENALISED, penalties=()).penalties == ()
    assert vary(PENALISED, **{"acting.sampler": MALA()}).acting.sampler == MALA()
    mine = MLP(7)
    assert vary(PENALISED, energy=mine).energy is mine
    assert vary(PENALISED) is PENALISED
    assert vary(PENALISED, energy=Residual(), blocks=5, count=3).energy == Residual(blocks=5)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_of_settings_does_not_matter(reverse: bool) -> None:
    """Half of the changes would not go together; all of them do."""
    changes: list[tuple[str, Any]] = [("energy", MLP()), ("objective", InfoNCE()), ("acting", Search())]
    explicit = {"energy": MixtureDensity(), "objective": Likelihood(), "acting": Direct()}
    order = changes[::-1] if reverse else changes
    assert vary(TRIALS["mdn"], **dict(order)) == Trial()
    back = list(explicit.items())
    assert vary(Trial(), **dict(back[::-1] if reverse else back)) == TRIALS["mdn"]


def test_the_original_is_not_changed() -> None:
    before = settings_of(PENALISED)
    vary(PENALISED, **{"penalties.0.weight": 4.0, "acting.sampler.steps": 3, "width": 8})
    assert settings_of(PENALISED) == before


def test_every_piece_on_the_way_is_checked() -> None:
    """The constructors run again: bad values, bad compositions, and what a piece derives from its settings."""
    assert vary(Branch(), weight=4.0).double == 8.0
    assert vary(Branch(leaves=(Branch(),)), **{"leaves.0.weight": 4.0}).leaves[0].double == 8.0
    with pytest.raises(ValueError, match="weight must not be negative, got -1"):
        vary(Branch(leaves=(Branch(),)), **{"leaves.0.weight": -1.0})
    with pytest.raises(ValueError, match="candidates must be at least 1, got 0"):
        vary(PENALISED, candidates=0)
    with pytest.raises(ValueError, match="Direct does not go with MLP"):
        vary(PENALISED, acting=Direct())
    with pytest.raises(ValueError, match="does not go with InfoNCE with Uniform"):
        vary(TRIALS["steady"], **{"objective.source": Uniform()})


def test_an_ambiguous_name_lists_what_it_may_mean() -> None:
    with pytest.raises(
        ValueError, match=r"'steps' is ambiguous: say which of objective\.source\.sampler\.steps, acting\."
    ):
        vary(PENALISED, steps=3)
    with pytest.raises(
        ValueError, match=r"'weight' is ambiguous: say which of penalties\.0\.weight, penalties\.1\.weight"
    ):
        vary(PENALISED, weight=3.0)
    with pytest.raises(ValueError, match="'width' is ambiguous"):
        vary(TRIALS["steady"], width=3)
    assert vary(TRIALS["steady"], **{"tilt.width": 3}).energy == replace(
        TRIALS["steady"].energy, tilt=replace(TRIALS["steady"].energy.tilt, width=3)
    )


@pytest.mark.parametrize("name", ["candidate", "acting.candidate", "penalties.2", "penalties.2.weight", "", "acting."])
def test_an_unknown_name_lists_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=rf"there is no setting '{name}'; there are .*acting\.candidates") as error:
        vary(PENALISED, **{name: 3})
    assert "penalties.0.weight" in str(error.value) and "objective.count" in str(error.value)


def test_settings_of_the_tilt_are_those_of_the_piece() -> None:
    energy = vary(Tilted(), **{"base.components": 3, "base_sees": "nothing"})
    assert energy == Tilted(MLP(), MixtureDensity(components=3), "nothing")
    assert vary(Langevin(), **{"schedule": Constant(0.5), "schedule.value": 0.25}).schedule == Constant(0.25)
