"""Named parts of observations and actions: from arrays through files and training to a saved policy."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import cebm
from cebm.demonstrations import DemonstrationError, Demonstrations
from cebm.parts import parts_from_json
from cebm.spaces import Part

PARTS = (Part("joints", (2,), ("shoulder", "elbow")), Part("goal", ()), Part("image", (1, 2)))
ACTIONS = (Part("velocity", (2,), ("x", "y")),)


def named(lengths: tuple[int, ...] = (4, 1, 3), generator: np.random.Generator | None = None) -> Demonstrations:
    random = np.random.default_rng() if generator is None else generator
    steps = sum(lengths)
    obs, actions = random.normal(size=(steps, 5)), random.normal(size=(steps, 2))
    return Demonstrations.from_arrays(obs, actions, np.cumsum(lengths), parts=PARTS, action_parts=ACTIONS)


def test_without_names_there_is_one_part() -> None:
    data = Demonstrations.from_arrays(np.zeros((3, 2)), np.ones((3, 1)), [3])
    assert data.parts == (Part("obs", (2,)),) and data.action_parts == (Part("action", (1,)),)


@pytest.mark.parametrize("form", ["set.npz", "set"])
def test_parts_survive_files_selections_and_splits(form: str, tmp_path: Path) -> None:
    data = named()
    data.save(tmp_path / form)
    loaded = Demonstrations.load(tmp_path / form)
    again = Demonstrations.from_episodes([data.episode(0)], parts=PARTS, action_parts=ACTIONS)
    for other in (loaded, loaded.select([2, 0]), *loaded.split(0.5, 0), again):
        assert other.parts == PARTS and other.action_parts == ACTIONS
    unnamed = Demonstrations.load(tmp_path / form, obs_key="action", action_key="obs")
    assert unnamed.parts == (Part("obs", (2,)),), "the parts of other arrays"


def test_files_without_parts_are_as_they_were(tmp_path: Path) -> None:
    """Byte for byte, so that earlier versions read them."""
    data = Demonstrations.from_arrays(np.zeros((3, 2)), np.ones((3, 1)), [3])
    data.save(tmp_path / "set")
    assert "parts" not in json.loads((tmp_path / "set" / "header.json").read_text())
    swapped = Demonstrations(
        data.obs, data.actions, data.episode_ends, {}, (Part("action", (2,)),), (Part("obs", (1,)),)
    )
    swapped.save(tmp_path / "swapped")
    assert Demonstrations.load(tmp_path / "swapped").parts == (Part("action", (2,)),)


@pytest.mark.parametrize(
    "parts, message",
    [
        ((Part("a", (4,)),), r"mine: obs has 5 columns, its parts have 4 \('a' 4\)"),
        ((Part("a", (2,)), Part("a", (3,))), r"mine: obs: parts must have different names, got \['a', 'a'\]"),
    ],
)
def test_parts_must_fit_the_columns(parts: tuple[Part, ...], message: str) -> None:
    with pytest.raises(DemonstrationError, match=message):
        Demonstrations.from_arrays(np.zeros((3, 5)), np.ones((3, 1)), [3], parts=parts, source="mine")


@pytest.mark.parametrize(
    "columns, message",
    [
        (("x",), "part 'p' has 2 columns, but names for 1"),
        (("x", "x"), "part 'p': columns must have different names, 'x' is empty or there twice"),
        (("x", ""), "part 'p': columns must have different names, '' is empty or there twice"),
    ],
)
def test_columns_must_fit_the_part(columns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Part("p", (2,), columns)


@pytest.mark.parametrize(
    "value",
    [
        3,
        [3],
        [{"name": "a"}],
        [{"name": "a", "shape": [1.5], "columns": []}],
        [{"name": 1, "shape": [], "columns": []}],
    ],
)
def test_a_header_whose_parts_make_no_sense(value: object, tmp_path: Path) -> None:
    """Sealed with its checksum, as a hostile writer would."""
    named().save(tmp_path / "set")
    path = tmp_path / "set" / "header.json"
    header = json.loads(path.read_text())
    header["parts"] = value
    header.pop("header_sha256")
    header["header_sha256"] = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(header))
    with pytest.raises(DemonstrationError, match=r"set: .*part"):
        Demonstrations.load(tmp_path / "set")
    with pytest.raises(ValueError):
        parts_from_json(value, "parts")


def test_every_damaged_byte_of_the_names_is_noticed(tmp_path: Path) -> None:
    named().save(tmp_path / "set")
    path = tmp_path / "set" / "header.json"
    content = path.read_bytes()
    start = content.index(b'"parts"')
    for place in range(start, content.index(b"]\n  }\n ]", start) if b"]\n  }\n ]" in content else len(content), 3):
        damaged = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        path.write_bytes(damaged)
        try:
            assert Demonstrations.load(tmp_path / "set").parts == PARTS  # white space has no meaning
        except DemonstrationError:
            continue


def test_a_policy_knows_the_parts_it_was_trained_on(tmp_path: Path) -> None:
    data = named((20, 20))
    trainer = cebm.Trainer(cebm.vary(cebm.TRIALS["steady"], history=2), data, data, steps=1)
    trainer.step()
    trainer.policy().save(tmp_path / "policy")
    spec = cebm.load(tmp_path / "policy").specification
    assert spec.parts == PARTS and spec.history == 2
    assert spec.columns("goal") == slice(7, 8)
