"""Storage: settings survive JSON, bundles survive failures, and a damaged file is refused by name."""

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from cebm.settings import StorageError as OneStorageError
from cebm.storage import (
    HEADER_BYTES,
    LockedError,
    StorageError,
    load_bundle,
    load_header,
    locked,
    read_document,
    read_rows,
    row_line,
    save_bundle,
    take,
    tensor_shapes,
    write_atomically,
    write_document,
)
from waiting import PATIENCE, eventually

fork = multiprocessing.get_context("fork")
GOLDEN = Path(__file__).parent / "golden"


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


@pytest.mark.parametrize(
    "changes",
    [
        *({"tensors": 5}, {"tensors": ["a"]}, {"version": "1"}, {"version": 1.5}, {"version": True}),
        *({"tensors": "a\0b"}, {"tensors": "\ud800"}, {"tensors": "a" * 10_000}, {"tensors": "header.json"}),
    ],
)
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


@pytest.fixture
def gone() -> int:
    """The number of a process that has ended."""
    process = fork.Process(target=int)
    process.start()
    process.join()
    assert process.pid is not None
    return process.pid


def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path: Path, gone: int) -> None:
    """Of the same path, and of processes that are gone; nothing else."""
    path = tmp_path / "run.json"
    left = [f".run.json.{gone}.tmp", f".run.json.{2**70}.tmp", ".run.json.0.tmp"]
    kept = [f".run.json.{os.getppid()}.tmp", ".run.json.tmp", f".other.json.{gone}.tmp", f".runxjson.{gone}.tmp"]
    for name in [*left, *kept]:
        (tmp_path / name).write_bytes(b"half")
    write_atomically(path, b"new")
    assert {entry.name for entry in tmp_path.iterdir()} == {"run.json", *kept}


def test_what_a_killed_save_left_is_removed_by_the_next_save(tmp_path: Path, gone: int) -> None:
    """The tensor file of another save has another name."""
    write(tmp_path, 1.0)
    for name in (f".tensors-0123456789ab.safetensors.{gone}.tmp", f".header.json.{gone}.tmp"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "tensors-0123456789ab.safetensors").write_bytes(b"the header never came")
    write(tmp_path, 2.0)
    assert {entry.name for entry in tmp_path.iterdir()} == {"header.json", tensor_file(tmp_path).name}


# -------------------------------------------------------------------------------------------- bundles: damage


def damaged(content: bytes, generator: torch.Generator) -> bytes:
    """One bit flipped, or cut short."""
    place = int(torch.randint(len(content), (), generator=generator))
    if torch.rand((), generator=generator) < 0.3:
        return content[:place]
    bit = int(torch.randint(8, (), generator=generator))
    return content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :]


@pytest.mark.parametrize("checksums_fit", [False, True])
def test_damage_anywhere_is_refused_or_without_effect(
    checksums_fit: bool, tmp_path: Path, generator: torch.Generator
) -> None:
    """300 damaged bundles. Where the checksums are made to fit again, the content may be another, but it is read or
    refused, and its shapes are those that were announced."""
    write(tmp_path)
    header_path, tensor_path = tmp_path / "header.json", tensor_file(tmp_path)
    whole = {path: path.read_bytes() for path in (header_path, tensor_path)}
    header, tensors = read(tmp_path)
    for k in range(300):
        path = (header_path, tensor_path)[k % 2]
        path.write_bytes(damaged(whole[path], generator))
        if checksums_fit:
            with suppress(ValueError, AttributeError, TypeError):  # a header that is no JSON object stays as it is
                rewrite_header(tmp_path, sha256=hashlib.sha256(tensor_path.read_bytes()).hexdigest())
        try:
            found, loaded = read(tmp_path)
        except StorageError as error:
            assert str(tmp_path) in str(error)
        else:
            if checksums_fit:
                assert tensor_shapes(tmp_path, found) == {name: tuple(t.shape) for name, t in loaded.items()}
            else:
                assert found == header and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
        for path, content in whole.items():
            path.write_bytes(content)


def test_deep_and_long_headers_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "header.json"
    for nested in ("[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 100_000, '{"a":' * 200 + "1" + "}" * 200):
        path.write_text('{"format": "test.bundle", "nested": ' + nested + "}")
        with pytest.raises(StorageError, match=r"header\.json: (damaged, nested too deeply|nested deeper than 100)"):
            read(tmp_path)
    path.write_bytes(b" " * (HEADER_BYTES + 1))
    with pytest.raises(StorageError, match=r"header\.json: damaged, longer than 16 MB"):
        read(tmp_path)


@pytest.mark.parametrize("key", ["format", "version", "tensors", "sha256", "header_sha256"])
def test_a_header_may_not_take_a_key_of_the_bundle(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"header: the key '{key}' belongs to the bundle"):
        save_bundle(tmp_path, "test.bundle", 3, {key: 1}, {})
    assert not list(tmp_path.iterdir())


def test_a_header_whose_keys_are_numbers_comes_back(tmp_path: Path) -> None:
    """JSON makes strings of them, whose order is another."""
    save_bundle(tmp_path, "test.bundle", 3, {"table": {2: "a", 10: "b"}}, {})
    assert read(tmp_path)[0]["table"] == {"2": "a", "10": "b"}


def test_the_shapes_are_known_without_the_tensors(tmp_path: Path) -> None:
    shapes = {"a": (3, 0, 2), "scalar": (), "b": (5,)}
    save_bundle(tmp_path, "test.bundle", 3, {"x": 1}, {name: torch.zeros(shape) for name, shape in shapes.items()})
    header = load_header(tmp_path, "test.bundle", 3)
    assert header["x"] == 1 and header == read(tmp_path)[0]
    assert tensor_shapes(tmp_path, header) == shapes
    path = tensor_file(tmp_path)
    for content in (b"", b"x", b"\xff" * 100, path.read_bytes()[:20]):
        path.write_bytes(content)
        with pytest.raises(StorageError, match=path.name):
            tensor_shapes(tmp_path, header)
    path.unlink()
    with pytest.raises(StorageError, match=f"{path.name}: No such file"):
        tensor_shapes(tmp_path, header)
    assert load_header(tmp_path, "test.bundle", 3) == header, "the header alone does not need the tensors"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("**/header.json")), ids=lambda path: str(path.parent.name))
def test_bundles_of_earlier_versions_load(path: Path) -> None:
    stored = json.loads(path.read_text())
    header, tensors = load_bundle(path.parent, stored["format"], stored["version"])
    assert header == stored and tensors
    assert tensor_shapes(path.parent, header) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# -------------------------------------------------------------------------------------------- bundles: two at a time


def test_there_is_one_storage_error() -> None:
    assert StorageError is OneStorageError


@contextmanager
def processes(target: Callable[..., None], count: int, *args: Any) -> Iterator[None]:
    """Runs until the block ends; then each must have ended well."""
    stop = fork.Event()
    workers = [fork.Process(target=target, args=(stop, k, *args), daemon=True) for k in range(count)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        stop.set()
        for worker in workers:
            worker.join(PATIENCE)
    assert [worker.exitcode for worker in workers] == [0] * count


def _keep_saving(stop: Any, number: int, directory: Path) -> None:
    os.fsync = lambda descriptor: None  # more saves per second, more chances to collide
    value = number
    while not stop.is_set():
        value = value % 2**20 + 7
        write(directory, float(value))


@pytest.mark.parametrize("writers", [1, 2])
def test_a_bundle_that_is_saved_meanwhile_is_always_whole(writers: int, tmp_path: Path) -> None:
    """1,000 loads while other processes save, and more where these get little of the processor. Two writers also must
    not remove each other's tensors."""
    write(tmp_path, 1.0)
    seen, loads, until = set(), 0, time.monotonic() + PATIENCE / 2
    with processes(_keep_saving, writers, tmp_path):
        while loads < 1000 or (len(seen) <= 20 and time.monotonic() < until):
            header, tensors = read(tmp_path)
            assert torch.equal(tensors["a"], torch.full((4, 2), float(header["step"])))
            seen.add(header["step"])
            loads += 1
    assert len(seen) > 20, "the writers did not get to write"
    read(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"header.json", tensor_file(tmp_path).name}


def test_a_save_between_header_and_tensors_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, for certain: each time the reader opens the tensors, the bundle has been saved anew."""
    write(tmp_path, 1.0)
    reading = Path.read_bytes
    values = iter([2.0, 1.0, 2.0, 3.0])

    def read_bytes(path: Path) -> bytes:
        for value in values:
            write(tmp_path, value)
            break
        return reading(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    header, tensors = read(tmp_path)
    assert header["step"] == 3 and torch.equal(tensors["a"], torch.full((4, 2), 3.0))


# -------------------------------------------------------------------------------------------- documents

DOCUMENT: dict[str, Any] = {"job": {"type": "cebm.training:Job", "steps": 3}, "scores": [0.1, None, True], "é": "\n"}


def test_a_document_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_document(path, DOCUMENT)
    assert read_document(path, "run") == read_document(path, "run", old=True) == DOCUMENT
    assert path.read_text().count("\n") > 5, "pretty-printed"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert read_document(path, "run") == DOCUMENT, "only the meaning counts"
    write_document(path, {"rows": {2: (1.5,), 10: ()}})
    assert read_document(path, "run") == {"rows": {"2": [1.5], "10": []}}


def test_a_document_of_an_earlier_version_is_read_on_request(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(DOCUMENT))
    assert read_document(path, "run", old=True) == DOCUMENT
    with pytest.raises(StorageError, match=r"run\.json: damaged or not a run, its checksum is missing"):
        read_document(path, "run")


def test_a_damaged_document_is_refused(tmp_path: Path, generator: torch.Generator) -> None:
    path = tmp_path / "run.json"
    write_document(path, DOCUMENT)
    whole = path.read_bytes()
    for _ in range(300):
        path.write_bytes(damaged(whole, generator))
        try:
            assert read_document(path, "run") == DOCUMENT
        except StorageError as error:
            assert str(path) in str(error)
    path.write_bytes(whole.replace(b'"steps": 3', b'"steps": 4'))
    with pytest.raises(StorageError, match=r"run\.json: damaged or altered"):
        read_document(path, "run", old=True)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"sha256": 3}', b'{"sha256": []}'])
def test_what_is_no_document_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"run\.json: damaged"):
        read_document(path, "run", old=True)


def test_a_missing_document_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"run\.json: not a run directory \(No such file"):
        read_document(tmp_path / "run.json", "run directory")


def test_a_document_may_not_take_the_key_of_its_checksum(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run\.json: the key 'sha256' belongs to"):
        write_document(tmp_path / "run.json", {"sha256": "x"})


# -------------------------------------------------------------------------------------------- rows

ROWS: list[dict[str, Any]] = [
    {"step": 0, "kind": "train", "loss": 0.1 + 0.2},
    {"step": 20, "kind": "evaluation", "success": 1.0, "note": None, "more": [1, 2]},
    {"step": 20, "kind": "train", "loss": 1e-300},
]


def test_rows_come_back_with_and_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    for lines in (map(row_line, ROWS), (json.dumps(row) + "\n" for row in ROWS)):
        path.write_text("".join(lines))
        assert read_rows(path) == ROWS
    assert row_line(ROWS[0]) == row_line(json.loads(row_line(ROWS[0]))), "a checksum that is there is replaced"
    for old in GOLDEN.glob("runs/*/metrics.jsonl"):
        assert read_rows(old) == [json.loads(line) for line in old.read_text().splitlines()]


@pytest.mark.parametrize("line", [row_line, lambda row: json.dumps(row) + "\n"], ids=["crc", "plain"])
def test_a_last_line_that_was_cut_short_is_left_out(line: Callable[[Any], str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = "".join(map(line, ROWS))
    for length in range(len(whole) + 1):
        path.write_text(whole[:length])
        rows = read_rows(path)
        complete = whole[:length].count("\n") + whole[:length].endswith("}")
        assert rows == ROWS[:complete]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "damaged, not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"kind": "train"}', "step must be an integer of at least 0, got None"),
        ('{"step": -1, "kind": "train"}', "step must be an integer of at least 0, got -1"),
        ('{"step": 1.0, "kind": "train"}', r"step must be an integer of at least 0, got 1\.0"),
        ('{"step": true, "kind": "train"}', "step must be an integer of at least 0, got True"),
        ('{"step": 1}', "kind must be a string, got None"),
        ('{"step": 1, "kind": 3}', "kind must be a string, got 3"),
        ('{"step": 1, "kind": "train", "crc": 3}', "damaged or altered"),
        (row_line(ROWS[0]).strip().replace("0.30", "0.31"), "damaged or altered"),
        (row_line(ROWS[1]).strip().replace("20", "21"), "damaged or altered"),
    ],
)
def test_a_damaged_row_is_named_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(row_line(ROWS[0]) + line + "\n" + row_line(ROWS[2]))
    with pytest.raises(StorageError, match=rf"metrics\.jsonl, line 2: .*{message}"):
        read_rows(path)
    path.write_text(row_line(ROWS[0]) + line + "\n")
    with pytest.raises(StorageError, match=r"metrics\.jsonl, line 2"):
        read_rows(path)


def test_a_row_that_could_not_be_read_is_not_written() -> None:
    with pytest.raises(StorageError, match="row: step must be"):
        row_line({"kind": "train"})


def test_rows_that_are_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Is a directory"):
        read_rows(tmp_path)


# -------------------------------------------------------------------------------------------- locks


@pytest.fixture(params=["flock", "pid file"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to lock."""
    if request.param == "pid file":
        monkeypatch.setattr("cebm.storage.fcntl", None)
    return request.param


def _hold(directory: Path, holding: Any, fork_too: bool) -> None:
    with locked(directory):
        if fork_too and os.fork() == 0:
            time.sleep(10 * PATIENCE)
            os._exit(0)
        holding.set()
        time.sleep(10 * PATIENCE)


@contextmanager
def holder(directory: Path, fork_too: bool = False) -> Iterator[Any]:
    """A process that holds the lock; it is the leader of a group, which is killed at the end."""
    holding = fork.Event()

    def work() -> None:
        os.setpgid(0, 0)
        _hold(directory, holding, fork_too)

    process = fork.Process(target=work, daemon=True)
    process.start()
    try:
        assert holding.wait(PATIENCE)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def test_one_process_at_a_time(locks: str, tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        for _ in range(2):
            with pytest.raises(LockedError, match=f"^{tmp_path} is in use by process {process.pid}"), locked(tmp_path):
                pass
    with locked(str(tmp_path), "study"):
        text = (tmp_path / ".lock").read_text()
        assert text == f"{os.getpid()}\nThe process with this number works in this study.\n"
        with pytest.raises(LockedError, match=f"in use by process {os.getpid()}"), locked(tmp_path):
            pass
    assert not list(tmp_path.iterdir())


def test_a_killed_process_is_no_obstacle(locks: str, tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert (tmp_path / ".lock").exists()
        with locked(tmp_path):
            assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()}\n")
        assert not (tmp_path / ".lock").exists()


def test_children_of_a_killed_process_are_no_obstacle(tmp_path: Path) -> None:
    """As workers that load data, which a killed training leaves for a moment."""
    with holder(tmp_path, fork_too=True) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with locked(tmp_path):
            pass


def test_a_child_does_not_release_its_parents_lock(locks: str, tmp_path: Path) -> None:
    """A forked child that leaves the block, and takes a lock of its own."""
    other = tmp_path / "other"
    other.mkdir()
    with locked(tmp_path):
        child = 0
        try:
            child = os.fork()
            if child == 0:
                raise KeyError("leaves the block")
            assert os.waitpid(child, 0)[1] == 0
            with pytest.raises(LockedError), locked(tmp_path):
                pass
        finally:
            if child == 0:
                with locked(other):
                    os._exit(0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["other"]


def test_a_lock_is_released_by_an_error(locks: str, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked(tmp_path):
            _ = 1 / 0


def test_a_directory_that_cannot_be_locked_is_named(locks: str, tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"nowhere/\.lock: cannot be locked \(No such file"),
        locked(tmp_path / "nowhere"),
    ):
        pass
    assert not list(tmp_path.iterdir()), "a mistyped name creates no directory"


def _contend(stop: Any, number: int, directory: Path) -> None:
    """Enters whenever it can; alone in there, or it ends badly."""
    while not stop.is_set():
        try:
            with locked(directory):
                mark = os.open(directory / "inside", os.O_CREAT | os.O_EXCL)
                os.close(mark)
                (directory / "inside").unlink()
                (directory / f"entered-{number}").touch()
        except LockedError:
            pass


def test_nobody_meets_another_inside(tmp_path: Path) -> None:
    """The file is removed at the end of each block: a newcomer must not lock the removed one."""
    with processes(_contend, 3, tmp_path):
        time.sleep(0.8)
        eventually(lambda: len(list(tmp_path.glob("entered-*"))) == 3)
    assert {entry.name for entry in tmp_path.iterdir()} == {"entered-0", "entered-1", "entered-2"}
