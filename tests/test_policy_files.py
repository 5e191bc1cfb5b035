"""Policies on disk: bit for bit, legible, and refused by name when damaged, altered or larger than they say."""

import json
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cebm.acting import Search
from cebm.energies import MLP, EnergyModel, MixtureDensity, ModuleEnergy, Regression, Residual, Tilted
from cebm.loading import load
from cebm.policy import FORMAT, VERSION, EnergyPolicy, Proposal
from cebm.samplers import MALA, DerivativeFree, Exponential, Langevin
from cebm.settings import StorageError
from cebm.spaces import Specification
from cebm.storage import load_bundle, save_bundle
from test_policy import ACT_BOX, OBS_BOX, Grid, bowl, network_policy, random_obs

GOLDEN = Path(__file__).parent / "golden" / "policies"

SAVED: dict[str, Callable[[torch.Generator], EnergyPolicy]] = {
    "mlp": lambda g: network_policy(MLP(16, init="torch"), g),
    "mlp, spectral norm": lambda g: network_policy(MLP(16, 3, spectral_norm=True), g),
    "residual": lambda g: network_policy(Residual(16, 2, 0.1, "torch"), g),
    "residual, spectral norm": lambda g: network_policy(Residual(16, spectral_norm=True), g),
    "regression": lambda g: network_policy(Regression(16, init="torch"), g),
    "mixture density": lambda g: network_policy(MixtureDensity(16, init="torch", components=3), g),
    "tilted, drawn": lambda g: network_policy(
        Tilted(MLP(16, init="torch"), MixtureDensity(16, components=3)),
        g,
        spec=Specification.flat(2, 2, smoothing=0.1),
        choice="draw",
        keep=4,
    ),
    "tilted marginal": lambda g: network_policy(Tilted(MLP(16), MixtureDensity(16), "nothing"), g),
    "tilted, regression's floor": lambda g: network_policy(Tilted(Residual(8), MixtureDensity(8, floor=0.2)), g),
    "other samplers": lambda g: network_policy(
        MLP(16), g, sampler=Langevin("ibc", 4, Exponential(0.3, 0.5), 0.02, None, margin=0.1)
    ),
    "derivative-free": lambda g: network_policy(MLP(16), g, sampler=DerivativeFree(4), candidates=50),
    "mala": lambda g: network_policy(MLP(16), g, sampler=MALA(5)),
    "somebody's energy": lambda g: network_policy(Own(Scaled(3.0)), g),
    "somebody's way to act": lambda g: replace(network_policy(MLP(16, init="torch"), g), acting=Grid(9)),
    "everything else": lambda g: network_policy(
        MLP(16),
        g,
        high=torch.tensor([280.0, 2.8]),
        data_energies=torch.randn(20, generator=g).sort().values,
        spec=Specification.flat(1, 1, 2, 2),
    ),
}
every_saved = pytest.mark.parametrize("name", SAVED)


@dataclass(frozen=True)
class Scaled:
    """A setting inside a setting."""

    scale: float = 1.0


@dataclass(frozen=True)
class Own:
    """Settings of somebody's energy, whose weights are replaced once more after the layers are made."""

    scaled: Scaled = Scaled()
    explicit = False

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        return ModuleEnergy(OwnRows(spec, self.scaled.scale, generator), spec.obs_dim, spec.act_dim)


class OwnRows(nn.Module):
    def __init__(self, spec: Specification, scale: float, generator: torch.Generator | None) -> None:
        super().__init__()
        self.layer = nn.Linear(spec.obs_dim, spec.act_dim)
        self.layer.weight = nn.Parameter(scale * torch.rand(self.layer.weight.shape, generator=generator))
        self.layer.bias = nn.Parameter(torch.zeros(spec.act_dim))

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        return (actions - self.layer(features).tanh()).square().sum(1)


@every_saved
def test_a_saved_policy_acts_the_same_bit_for_bit(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    policy = SAVED[name](generator)
    policy.save(tmp_path / "policy")
    before = torch.get_rng_state()
    loaded = load(str(tmp_path / "policy"))
    if name != "somebody's energy":
        assert torch.equal(torch.get_rng_state(), before), "loading used torch's global generator"
    assert type(loaded) is type(policy)
    obs = random_obs(6, generator)
    one, other = policy.propose(obs, candidates=9), loaded.propose(obs, candidates=9)
    for item in fields(Proposal):
        values, again = getattr(one, item.name), getattr(other, item.name)
        assert torch.equal(values.nan_to_num(-1), again.nan_to_num(-1)), item.name
    assert np.array_equal(policy.act(obs), loaded.act(obs))
    stranger = SAVED[name](generator).propose(obs, candidates=9)
    same = torch.equal(stranger.energies, one.energies) and torch.equal(stranger.candidates, one.candidates)
    assert not same, "other weights give the same: this shows nothing"
    for attribute in ("settings", "spec", "acting", "history", "horizon"):
        assert getattr(loaded, attribute) == getattr(policy, attribute)
    # And again: what was loaded can be saved.
    loaded.save(tmp_path / "again")
    contents = [sorted((p.name, p.read_bytes()) for p in (tmp_path / d).iterdir()) for d in ("policy", "again")]
    assert contents[0] == contents[1]


def test_a_policy_in_double_precision(tmp_path: Path, generator: torch.Generator) -> None:
    policy = network_policy(MLP(16, init="torch"), generator, low=None)
    policy = replace(
        policy, energy=policy.energy.double(), obs_box=OBS_BOX.to(torch.float64), act_box=ACT_BOX.to(torch.float64)
    )
    obs = random_obs(3, generator)
    assert policy.act(obs).dtype == np.float64
    policy.save(tmp_path)
    assert np.array_equal(load(tmp_path).act(obs), policy.act(obs))


def test_one_box_for_both(tmp_path: Path, generator: torch.Generator) -> None:
    """Tensors that share their memory are saved all the same."""
    policy = replace(network_policy(MLP(8), generator, low=None), act_box=OBS_BOX)
    policy.save(tmp_path)
    assert np.array_equal(load(tmp_path).act(np.ones(2)), policy.act(np.ones(2)))


def test_saving_over_a_policy_replaces_it(tmp_path: Path, generator: torch.Generator) -> None:
    for name in ("mlp", "mixture density", "residual"):
        policy = SAVED[name](generator)
        policy.save(tmp_path)
        assert np.array_equal(load(tmp_path).act(np.ones(2)), policy.act(np.ones(2)))
    assert len(list(tmp_path.iterdir())) == 2


@every_saved
def test_there_is_no_pickle_on_disk(name: str, tmp_path: Path, generator: torch.Generator) -> None:
    SAVED[name](generator).save(tmp_path)
    for path in tmp_path.iterdir():
        assert path.suffix in (".json", ".safetensors")
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, AttributeError)):
            pickle.loads(path.read_bytes())


def test_an_energy_without_settings_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a policy around your own energy has no settings to save"):
        bowl().save(tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


def test_your_own_schedule_cannot_be_saved(tmp_path: Path, generator: torch.Generator) -> None:
    sampler = Langevin("ibc", schedule=lambda k, n: 0.1)
    policy = network_policy(MLP(8), generator, sampler=sampler)
    with pytest.raises(TypeError, match="function cannot be saved"):
        policy.save(tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


@pytest.fixture
def saved(tmp_path: Path, generator: torch.Generator) -> Path:
    SAVED["everything else"](generator).save(tmp_path / "policy")
    return tmp_path / "policy"


RESERVED = ("format", "version", "tensors", "sha256", "header_sha256")


def rewrite(where: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> None:
    """A bundle whose checksums are right and whose content is not."""
    header, tensors = load_bundle(where, FORMAT, VERSION)
    change(header, tensors)
    shutil.rmtree(where)
    version = header["version"]
    save_bundle(where, FORMAT, version, {k: v for k, v in header.items() if k not in RESERVED}, tensors)


def refused(where: Path, message: str) -> None:
    with pytest.raises(StorageError, match=message) as caught:
        load(where)
    assert str(where) in str(caught.value)


HEADER = ["energy", "acting", "spec", "obs_margin", "act_margin"]
BOXES = ["obs_box.centre", "obs_box.scale", "act_box.centre", "act_box.scale"]


@pytest.mark.parametrize("key", HEADER)
def test_a_missing_setting_is_named(key: str, saved: Path) -> None:
    rewrite(saved, lambda header, tensors: header.pop(key))
    refused(saved, f"'{key}' is missing")


@pytest.mark.parametrize("key", [*BOXES, "energy.first.weight", "energy.last.bias"])
def test_a_missing_tensor_is_named(key: str, saved: Path) -> None:
    rewrite(saved, lambda header, tensors: tensors.pop(key))
    refused(saved, key.removeprefix("energy."))


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("energy.first.weight", (16, 5), r"weights do not fit the settings.*first\.weight is \(16, 5\) in the file"),
        ("energy.last.bias", (2,), r"weights do not fit the settings.*last\.bias"),
        ("energy.unknown", (2,), "unknown"),
        ("act_box.centre", (3,), "centre and scale must be vectors of one length"),
        ("obs_box.scale", (1,), "centre and scale must be vectors of one length"),
        ("obs_box.centre", (2, 2), "centre and scale must be vectors of one length"),
        ("obs_box.centre", (), "centre and scale must be vectors of one length"),
        ("low", (3,), r"low has shape \(3,\), actions have 2 dimensions"),
        ("high", (1,), r"high has shape \(1,\), actions have 2 dimensions"),
        ("data_energies", (3, 2), "data_energies must be a vector"),
        ("data_energies", (0,), "data_energies must be a vector"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], message: str, saved: Path, unchecked_shapes: None
) -> None:
    rewrite(saved, lambda header, tensors: tensors.update({name: torch.ones(shape)}))
    refused(saved, message)


def part(history: int = 2, size: int = 1, action: int = 1) -> dict[str, Any]:
    return {
        "type": "cebm.spaces:Specification",
        "parts": [{"type": "cebm.spaces:Part", "name": "obs", "shape": [size]}],
        "action": action,
        "history": history,
        "horizon": 2,
    }


def search(**changes: Any) -> dict[str, Any]:
    return {"acting": {"type": "cebm.acting:Search", **changes}}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"energy": {"type": "RandomPolicy"}}, "RandomPolicy"),
        ({"energy": {"type": "cebm.samplers:Langevin"}}, "expected EnergySettings, got cebm.samplers:Langevin"),
        ({"energy": None}, "expected EnergySettings, got None"),
        ({"energy": {"type": "cebm.energies.feedforward:MLP", "height": 3}}, "MLP has no field 'height'"),
        ({"energy": {"type": "cebm.energies.feedforward:MLP", "width": "16"}}, r"MLP\.width: expected int"),
        ({"energy": {"type": "cebm.energies.density:Regression", "width": 16}}, "weights do not fit the settings"),
        ({"act_margin": -1.0}, "margin must be at least 0"),
        ({"act_margin": None}, "act_margin: expected float, got None"),
        ({"obs_margin": True}, "obs_margin: expected float, got True"),
        ({"spec": part(7)}, "obs_box has 2 dimensions, the specification 7"),
        ({"spec": part(action=2)}, "act_box has 2 dimensions, the specification 4"),
        ({"spec": part(0)}, "history must be at least 1, got 0"),
        ({"spec": part(2, -1)}, "sizes must not be negative"),
        ({"spec": None}, "expected Specification, got None"),
        (search(sampler={"type": "Gibbs"}), "Gibbs"),
        (search(sampler={"type": "cebm.samplers:Gibbs"}), "Gibbs"),
        (search(sampler={"type": "os:system"}), "os:system"),
        (search(sampler=None), r"Search\.sampler: expected Sampler, got None"),
        (search(candidates=-1), "candidates must be at least 1, got -1"),
        (search(candidates=None), r"Search\.candidates: expected int, got None"),
        (search(candidates=True), r"Search\.candidates: expected int, got True"),
        (search(choice="maximum"), r"Search\.choice: expected Literal.*got 'maximum'"),
        (search(keep=0.5), r"Search\.keep: expected int, got 0.5"),
        ({"acting": []}, "expected Acting"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any], message: str, saved: Path) -> None:
    rewrite(saved, lambda header, tensors: header.update(change))
    refused(saved, message)


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0])
def test_units_that_make_no_sense_are_refused(value: float, saved: Path) -> None:
    rewrite(saved, lambda header, tensors: tensors["obs_box.scale"].fill_(value))
    refused(saved, "scale")


def test_altered_newer_and_missing_files_are_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "file"):
        refused(tmp_path / name, rf"/{name}: there is no such directory; a saved policy is one")
    (tensors,) = saved.glob("*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    refused(saved, "damaged or altered")
    content[-1] ^= 1
    tensors.write_bytes(content)
    load(saved)
    header = saved / "header.json"
    text = header.read_text()
    header.write_text(text.replace('"candidates": 32', '"candidates": 33'))
    assert header.read_text() != text
    refused(saved, "damaged or altered")
    header.write_text(text)
    rewrite(saved, lambda header, tensors: header.update(version=VERSION + 1))
    refused(saved, "written by a newer cebm")


def test_what_is_saved_is_legible(saved: Path) -> None:
    """A person can read the settings."""
    header = json.loads((saved / "header.json").read_text())
    assert header["energy"]["width"] == 16 and header["acting"]["sampler"]["noise"] == 0.01
    assert header["spec"]["history"] == 2


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "foo", "foo:1"])
def test_a_device_that_is_not_there_is_named(device: str, saved: Path) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=re.escape(f"device '{device}' cannot be used on this machine")) as caught:
        load(saved, device)
    assert not isinstance(caught.value, StorageError)


# -------------------------------------------------------------------------------------------- headers that lie

SIZES = ("width", "hidden_layers", "blocks", "components")


@pytest.mark.parametrize("size", [30_000, 1_000_000, 10**9, 10**10, 10**15, 2**62, 2**70])
@pytest.mark.parametrize("name", ["mlp", "residual", "regression", "mixture density", "tilted, drawn"])
def test_sizes_that_do_not_fit_are_refused_at_once(
    name: str, size: int, tmp_path: Path, generator: torch.Generator, unchecked_shapes: None
) -> None:
    """Before memory for them is asked for; in a second of the processor, where the true sizes would take hours or all
    the memory."""
    SAVED[name](generator).save(tmp_path / "policy")
    original = tmp_path / "policy"
    paths = [path for path, _ in places(load_bundle(original, FORMAT, VERSION)[0]["energy"]) if path[-1] in SIZES]
    assert paths
    for path in paths:
        where = tmp_path / "lie"
        shutil.copytree(original, where)
        rewrite(where, lambda header, tensors, path=path: put(header["energy"], path, size))
        began = time.process_time()
        refused(where, "lie")
        assert time.process_time() - began < 1.0, path
        shutil.rmtree(where)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value of a JSON document with its path, containers too."""
    if path:
        yield path, data
    parts = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in parts:
        yield from places(value, (*path, key))


def put(data: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


STRANGE: list[Any] = [None, True, -1, 0, 2**70, 1e300, math.nan, math.inf, "", "maximum", [], {}, [1], {"type": None}]
STRANGE += [{"type": "cebm.policy:load"}, {"type": "os:system"}, {"float": "nan"}, {"type": "cebm.samplers:MALA"}]


@pytest.mark.parametrize(
    "source", ["golden " + path.name for path in sorted(GOLDEN.iterdir())] + ["tilted, drawn", "everything else"]
)
def test_a_header_of_wrong_types_is_a_storage_error(
    source: str,
    tmp_path: Path,
    generator: torch.Generator,
    unchecked_shapes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each value of the header in turn is replaced, removed or renamed, and the header signed again. What still loads
    must act. Of the replacements a random few per place, fresh in every run."""
    original = tmp_path / "policy"
    if source.startswith("golden "):
        shutil.copytree(GOLDEN / source.removeprefix("golden "), original)
    else:
        SAVED[source](generator).save(original)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of files
    header, tensors = load_bundle(original, FORMAT, VERSION)
    content = {key: value for key, value in header.items() if key not in RESERVED}
    where = tmp_path / "altered"
    for path, _ in places(content):
        for value in [*random.sample(STRANGE, 3), "removed", "renamed"]:
            changed = json.loads(json.dumps(content))
            put(changed, path, value)
            if value in ("removed", "renamed"):
                holder = changed
                for key in path[:-1]:
                    holder = holder[key]
                del holder[path[-1]]
                if value == "renamed" and isinstance(holder, dict):
                    holder["strange"] = 1
            save_bundle(where, FORMAT, header["version"], changed, tensors)
            try:
                policy = load(where)
            except StorageError as error:
                assert str(where) in str(error), (path, value)
                continue
            except Exception as error:
                raise AssertionError(f"{path} = {value!r}: {type(error).__name__}: {error}") from error
            if value in (1e300, 2**70):  # honest numbers that no search can work with
                continue
            try:
                policy.act(np.zeros(policy.obs_box.dim), candidates=2, steps=1)
            except ValueError as error:  # an honest setting of a kind that has no action here
                assert "NaN or infinite" in str(error), (path, value)


STRANGERS = """
from dataclasses import dataclass
from cebm.energies import MLP
@dataclass(frozen=True)
class Mine:
    width: int = 4
    def build(self, spec, generator=None):
        return MLP(self.width).build(spec, generator)
"""


def test_a_policy_of_classes_that_are_not_imported_says_which(tmp_path: Path) -> None:
    (tmp_path / "strange_pieces.py").write_text(STRANGERS)
    code = (
        "import torch, strange_pieces as s; from cebm.policy import *; from cebm.spaces import *; "
        "e = s.Mine(); spec = Specification.flat(1, 1); box = Box.from_bounds([0.0], [1.0]); "
        "EnergyPolicy(e.build(spec), box, box, spec=spec, settings=e).save('policy')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    refused(tmp_path / "policy", "strange_pieces")
    assert "strange_pieces" not in sys.modules
    sys.path.insert(0, str(tmp_path))
    try:
        import strange_pieces

        policy = load(tmp_path / "policy")
        assert policy.settings == strange_pieces.Mine() and isinstance(policy.acting, Search)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("strange_pieces", None)
