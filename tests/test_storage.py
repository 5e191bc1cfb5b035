"""Storage: settings survive JSON, bundles survive failures, and a damaged file is refused by name."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from cebm.envs.particle import ParticleTask
from cebm.policy import Network
from cebm.samplers import MALA, Constant, DerivativeFree, Exponential, Langevin, Polynomial
from cebm.storage import StorageError, from_json, load_bundle, save_bundle, take, to_json, write_atomically
from cebm.training import JOB_CLASSES, Job
from cebm.trials import TRIALS, Trial

SETTINGS: dict[str, Any] = {
    "langevin, constant": Langevin("correct", 7, Constant(0.03), step_clip=None, margin=None),
    "langevin, polynomial": Langevin("ibc", 12, Polynomial(0.7, 1e-5, 3.0), 0.1, 0.125, "half-range", 0.2),
    "langevin, exponential": Langevin("ibc", schedule=Exponential(0.2, 0.9), noise=1 / 3),
    "mala": MALA(11, 0.1 + 0.2, 3, 0.6, None),
    "derivative-free": DerivativeFree(5, 0.1, 0.7, 2.0, 0.0, True),
    "network": Network("residual", 17, 3, 0.1, "torch", True, 5),
    "trial": replace(TRIALS["dfo"], network=Network(width=8), ema=0.9, history=2, horizon=3),
    "task": ParticleTask(3, 70, hide_velocity=True, random_order=True, wait=4, dt=0.004),
    "job": Job("mine", TRIALS["mdn"], ParticleTask(1), None, 7, 11, 13),
    **{f"trial {name}": trial for name, trial in TRIALS.items()},
}


# -------------------------------------------------------------------------------------------- settings as JSON


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_survive_json(name: str) -> None:
    """Through text, and with equal types: 1 and 1.0 are equal but not the same."""
    value = SETTINGS[name]
    read = from_json(json.loads(json.dumps(to_json(value))), JOB_CLASSES)
    assert read == value and type(read) is type(value)
    for field in fields(value):
        assert type(getattr(read, field.name)) is type(getattr(value, field.name))


@pytest.mark.parametrize("cls", JOB_CLASSES)
def test_a_changed_field_is_not_lost(cls: type) -> None:
    """Every field of every class makes it to the text: changing any changes the text."""
    example = next(value for value in map(_example_of(cls), SETTINGS.values()) if value is not None)
    written = to_json(example)
    assert written.keys() == {"type", *(field.name for field in fields(cls))}


def _example_of(cls: type) -> Callable[[Any], Any]:
    """Finds an instance inside a value."""

    def search(value: Any) -> Any:
        if isinstance(value, cls):
            return value
        for field in fields(value) if hasattr(value, "__dataclass_fields__") else ():
            found = search(getattr(value, field.name))
            if found is not None:
                return found
        return None

    return search


def test_tuples_come_back_as_tuples_and_dictionaries_as_dictionaries() -> None:
    value = {"a": (1, (2.5, None)), "b": {"c": True, "d": "x", "e": (Constant(0.5),)}}
    assert from_json(json.loads(json.dumps(to_json(value))), [Constant]) == value


@pytest.mark.parametrize(
    "value, message",
    [
        (torch.zeros(1), "Tensor cannot be saved"),
        (Langevin(schedule=lambda k, n: 0.1), "function cannot be saved"),
        ({"a": object()}, "object cannot be saved"),
        (Langevin, "type cannot be saved"),
    ],
)
def test_what_is_no_plain_value_is_refused(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        to_json(value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"width": None}, r"here: Network: missing \['width'\], unknown \[\]"),
        ({"height": 3}, r"here: Network: missing \[\], unknown \['height'\]"),
        ({"width": None, "height": 3}, r"here: Network: missing \['width'\], unknown \['height'\]"),
        ({"type": "Netwerk"}, "here: unknown type 'Netwerk'; this version knows Network, Trial"),
    ],
)
def test_missing_and_unknown_fields_are_named(change: dict[str, Any], message: str) -> None:
    data = to_json(Network()) | change
    data = {key: value for key, value in data.items() if value is not None}
    with pytest.raises(StorageError, match=message):
        from_json(data, [Trial, Network], "here")


def test_an_inner_object_is_checked_too() -> None:
    data = to_json(Langevin("ibc", schedule=Constant(0.1)))
    del data["schedule"]["value"]
    with pytest.raises(StorageError, match=r"here: Constant: missing \['value'\]"):
        from_json(data, [Langevin, Constant], "here")


def test_a_value_that_its_class_refuses_is_named() -> None:
    with pytest.raises(StorageError, match="here: Langevin: noise must be at least 0"):
        from_json(to_json(Langevin("ibc")) | {"noise": -1.0}, [Langevin, Polynomial], "here")


def test_take_names_the_place() -> None:
    assert take({"a": 1}, "a", "file") == 1
    with pytest.raises(StorageError, match="file: 'b' is missing"):
        take({"a": 1}, "b", "file")


# -------------------------------------------------------------------------------------------- bundles


def write(directory: Path, value: float = 1.0, version: int = 3, kind: str = "test.bundle") -> None:
    tensors = {"a": torch.full((4, 2), value), "b": torch.tensor([1, 2], dtype=torch.int64)}
    save_bundle(directory, kind, version, {"step": int(value), "nested": {"x": [1, 2.5]}}, tensors)


def read(directory: Path, version: int = 3) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return load_bundle(directory, "test.bundle", version)


def tensor_file(directory: Path) -> Path:
    (path,) = directory.glob("tensors-*")
    return path


def rewrite_header(directory: Path, **changes: Any) -> None:
    """As one with intent would: its checksum is made to fit again, so that the other checks are seen."""
    path = directory / "header.json"
    header = json.loads(path.read_text()) | changes
    header = {key: value for key, value in header.items() if value is not None}
    sealed = {key: value for key, value in header.items() if key != "header_sha256"}
    if "header_sha256" in header:
        header["header_sha256"] = hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(header))


def test_a_bundle_comes_back(tmp_path: Path) -> None:
    where = tmp_path / "not" / "there" / "yet"
    write(where, 5.0)
    header, tensors = read(where)
    assert header["step"] == 5 and header["nested"] == {"x": [1, 2.5]} and header["version"] == 3
    assert tensors.keys() == {"a", "b"}
    assert torch.equal(tensors["a"], torch.full((4, 2), 5.0))
    assert torch.equal(tensors["b"], torch.tensor([1, 2])) and tensors["b"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_every_dtype_shape_and_layout(dtype: torch.dtype, tmp_path: Path, generator: torch.Generator) -> None:
    base = torch.randint(0, 2, (3, 4), generator=generator).to(dtype)
    one = torch.ones(2)
    tensors = {"whole": base, "scalar": base[0, 0], "empty": base[:0], "turned": base.t(), "row": base[1].expand(5, 4)}
    save_bundle(tmp_path, "test.bundle", 3, {}, tensors | {"same": one, "memory": one})
    _, loaded = read(tmp_path)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype and torch.equal(loaded[name], tensor)
    assert torch.equal(loaded["same"], loaded["memory"])


def test_writing_again_leaves_one_tensor_file(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 2.0, 3.0):
        write(tmp_path, value)
        assert {path.name for path in tmp_path.iterdir()} == {"header.json", tensor_file(tmp_path).name}
        assert read(tmp_path)[1]["a"][0, 0] == value


def test_any_altered_byte_is_noticed(tmp_path: Path, generator: torch.Generator) -> None:
    """Of the tensors: every bit counts. Of the header: whatever still loads says the same (white space)."""
    write(tmp_path)
    path, header = tensor_file(tmp_path), tmp_path / "header.json"
    whole, text = path.read_bytes(), header.read_bytes()
    expected = read(tmp_path)[0]
    for place in torch.randperm(len(whole), generator=generator)[:50].tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        with pytest.raises(StorageError, match=f"{path.name}: damaged or altered"):
            read(tmp_path)
    path.write_bytes(whole)
    survived = 0
    for place in range(len(text)):
        header.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        try:
            assert read(tmp_path)[0] == expected
            survived += 1
        except StorageError as error:
            assert str(tmp_path) in str(error)
    assert survived < len(text) / 4


@pytest.mark.parametrize("keep", [0, 1, 7, 8, -1])
def test_truncated_files_are_noticed(keep: int, tmp_path: Path) -> None:
    write(tmp_path)
    path, header = tensor_file(tmp_path), tmp_path / "header.json"
    whole, text = path.read_bytes(), header.read_bytes().rstrip()
    path.write_bytes(whole[:keep])
    with pytest.raises(StorageError, match=f"{path.name}: damaged or altered"):
        read(tmp_path)
    path.write_bytes(whole)
    header.write_bytes(text[:keep])
    with pytest.raises(StorageError, match=r"header\.json: damaged, not JSON"):
        read(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere.header\.json: No such file"):
        read(tmp_path / "nowhere")
    write(tmp_path)
    path = tensor_file(tmp_path)
    path.unlink()
    with pytest.raises(StorageError, match=f"{path.name}: No such file"):
        read(tmp_path)
    with pytest.raises(StorageError, match=r"header\.json.*: Not a directory"):
        read(tmp_path / "header.json")


def test_a_newer_format_is_refused_and_an_older_one_read(tmp_path: Path) -> None:
    write(tmp_path, version=4)
    with pytest.raises(StorageError, match=r"header\.json: written by a newer cebm \(format 4, .* up to 3\)"):
        read(tmp_path)
    write(tmp_path, version=2)
    assert read(tmp_path)[0]["version"] == 2


@pytest.mark.parametrize("content", [b"[1, 2]", b"3", b"null", b"{}", b'{"format": "other"}', b"\xff\xfe"])
def test_what_is_no_bundle_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "header.json").write_bytes(content)
    with pytest.raises(StorageError, match=r"header\.json: (not a test\.bundle|damaged)"):
        read(tmp_path)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    write(tmp_path, kind="test.other")
    with pytest.raises(StorageError, match=r"header\.json: not a test\.bundle"):
        read(tmp_path)


@pytest.mark.parametrize("key", ["tensors", "sha256", "version", "header_sha256"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    write(tmp_path)
    rewrite_header(tmp_path, **{key: None})
    with pytest.raises(StorageError, match=rf"header\.json: {key} missing"):
        read(tmp_path)


@pytest.mark.parametrize("changes", [{"tensors": 5}, {"tensors": ["a"]}, {"version": "1"}, {"version": 1.5}])
def test_a_header_that_makes_no_sense_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path)
    rewrite_header(tmp_path, **changes)
    with pytest.raises(StorageError, match=r"header\.json: damaged"):
        read(tmp_path)


def test_an_altered_setting_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "header.json"
    path.write_text(path.read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(StorageError, match=r"header\.json: damaged or altered"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["../{}", "../../outside/{}", "{absolute}", "sub/../../outside/{}", "..", ".", ""])
def test_the_tensors_are_read_from_the_bundle_only(name: str, tmp_path: Path) -> None:
    """A file outside with the right checksum must not be found."""
    bundle, outside = tmp_path / "bundle", tmp_path / "outside"
    write(bundle)
    moved = tensor_file(bundle)
    for target in (tmp_path, outside):
        target.mkdir(exist_ok=True)
        (target / moved.name).write_bytes(moved.read_bytes())
    moved.unlink()
    rewrite_header(bundle, tensors=name.format(moved.name, absolute=outside / moved.name))
    with pytest.raises(StorageError):
        read(bundle)


def test_a_tensor_file_that_is_not_one_is_refused(tmp_path: Path) -> None:
    """With its checksum in order: what the writer wrote was wrong already."""
    write(tmp_path)
    tensor_file(tmp_path).write_bytes(b"not a tensor")
    rewrite_header(tmp_path, sha256=hashlib.sha256(b"not a tensor").hexdigest())
    with pytest.raises(StorageError, match="not a safetensors file"):
        read(tmp_path)


def test_nothing_on_disk_is_a_pickle(tmp_path: Path) -> None:
    """Header: text. Tensors: exactly what safetensors writes."""
    write(tmp_path)
    json.loads((tmp_path / "header.json").read_text())
    tensors = {"a": torch.full((4, 2), 1.0), "b": torch.tensor([1, 2])}
    assert tensor_file(tmp_path).read_bytes() == save(tensors)


# -------------------------------------------------------------------------------------------- failures


@dataclass
class FullDisk:
    """The `n`-th call of a function fails as on a full disk; what it got so far is on disk."""

    function: Callable[..., Any]
    n: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.n -= 1
        if self.n == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_failed_write_keeps_the_old_bundle(
    function: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write is that of the tensors, the second that of the header."""
    write(tmp_path, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, function, FullDisk(getattr(os, function), n))
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, 2.0)
    header, tensors = read(tmp_path)
    assert header["step"] == 1 and torch.equal(tensors["a"], torch.ones(4, 2))
    assert not list(tmp_path.glob(".*")), "debris"
    write(tmp_path, 3.0)
    assert read(tmp_path)[0]["step"] == 3
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_in_the_middle_of_writing_keeps_the_old_bundle(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1.0)
    opened = open
    calls = 0

    def full(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        file = opened(path, mode, *args, **kwargs)
        if "w" in mode:
            calls += 1
            if calls == n:
                file.write(b"half")
                file.flush()
                file.close()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return file

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", full)
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path, 2.0)
    assert calls == n
    assert read(tmp_path)[0]["step"] == 1
    assert not list(tmp_path.glob(".*")), "debris"


def test_a_reader_between_two_writes_sees_a_whole_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read after every single move into place while a bundle is overwritten."""
    write(tmp_path, 1.0)
    seen = []
    move = os.replace

    def moving(*args: Any) -> None:
        move(*args)
        header, tensors = read(tmp_path)
        assert torch.equal(tensors["a"], torch.full((4, 2), float(header["step"])))
        seen.append(header["step"])

    monkeypatch.setattr(os, "replace", moving)
    write(tmp_path, 2.0)
    assert seen == [1, 2]


def test_an_interrupted_write_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
