"""LeRobot datasets v2.1 and v3.0: Parquet and JSON as their `meta/info.json` describes, and their videos by request."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cebm.demonstrations.checks import DemonstrationError
from cebm.demonstrations.episodes import Demonstrations
from cebm.demonstrations.large import Growing
from cebm.demonstrations.readers.assembling import Wanted, assembled, groups_of, inside, needed
from cebm.demonstrations.readers.tables import parquet_columns, parquet_file

_FIELD = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")
_LARGEST_TEXT = 64 << 20  # bytes of a JSON file
_VIDEO = ("video", "image")


@dataclass(frozen=True)
class Stretch:
    """An episode: where its rows and its frames are."""

    index: int
    length: int
    data: dict[str, int]
    """What fills the template of the data's path."""
    videos: dict[str, dict[str, Any]]
    """By the key of a video: what fills the template of its path, and `from_timestamp`, its first frame's time."""


def read_lerobot(path: Path, wanted: Wanted) -> Demonstrations:
    """A folder with `meta/info.json`. By default observation.state and action; a key of a video is decoded on request,
    to one column per value of a pixel."""
    info = read_info(path, wanted)
    if wanted.episodes:
        raise wanted.error("a LeRobot dataset knows its episodes: leave episodes away")
    features = info["features"]
    about = {key: value for key, value in features.items() if isinstance(value, dict)}
    keys: list[str] = []
    for what, words, usual in (
        ("obs", wanted.obs, ("observation.state",)),
        ("action", wanted.action, ("action",)),
    ):
        keys += [key for group in groups_of(words or usual, about, what, wanted) for key in group.keys]
    stretches = list(_episodes(path, info, wanted))
    if not stretches:
        raise wanted.error("there are no episodes")
    videos = [key for key in keys if about[key].get("dtype") in _VIDEO]
    columns = _columns(path, info, stretches, [key for key in keys if key not in videos], wanted)
    for key in videos:
        columns[key] = _all_frames(path, info, stretches, key, wanted)
    names = {key: _names(about[key]) for key in keys}
    unread = [key for key, feature in about.items() if feature.get("dtype") in _VIDEO and key not in videos]
    metadata = {"format": f"lerobot {info['codebase_version']}", "fps": info.get("fps"), "unread_videos": unread}
    ends = np.cumsum([stretch.length for stretch in stretches])
    return assembled(wanted, columns, names=names, metadata=metadata, ends=ends)


def read_info(path: Path, wanted: Wanted) -> dict[str, Any]:
    """`meta/info.json`, of a version that is known."""
    info = _json(path, path / "meta" / "info.json", wanted)
    version = info.get("codebase_version")
    if version not in ("v2.0", "v2.1", "v3.0"):
        raise wanted.error(f"looks like a LeRobot dataset of version {version!r}; v2.0, v2.1 and v3.0 are read")
    if not isinstance(info.get("features"), dict):
        raise wanted.error("meta/info.json lists no features")
    return info


def _json(root: Path, file: Path, wanted: Wanted) -> dict[str, Any]:
    found = _parsed(_text(root, file, wanted), file, wanted)
    if not isinstance(found, dict):
        raise wanted.error(f"meta/{file.name} is no JSON object")
    return found


def _text(root: Path, file: Path, wanted: Wanted) -> bytes:
    inside(root, file, wanted)
    try:
        if file.stat().st_size > _LARGEST_TEXT:
            raise wanted.error(f"{file.name} has more than {_LARGEST_TEXT:,} bytes")
        return file.read_bytes()
    except OSError as error:
        raise wanted.error(f"{file.relative_to(root)} cannot be read: {error.strerror or error}") from error


def _parsed(content: bytes, file: Path, wanted: Wanted) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise wanted.error(f"meta/{file.name} is not readable JSON: {error}") from error


def _names(feature: Mapping[str, Any]) -> Any:
    """Names of columns: a list, or a dictionary with one list."""
    names = feature.get("names")
    if isinstance(names, dict) and len(names) == 1:
        names = next(iter(names.values()))
    return names if isinstance(names, list) and feature.get("dtype") not in _VIDEO else ()


def filled(root: Path, template: Any, values: Mapping[str, Any], wanted: Wanted) -> Path:
    """The path that a template of `meta/info.json` means, {name} or {name:03d}; it stays inside the dataset."""

    def field(match: re.Match[str]) -> str:
        name, width = match.groups()
        if name not in values:
            raise wanted.error(f"meta/info.json: the path {template!r} needs {name!r}, which is not known")
        return f"{values[name]:0{int(width)}d}" if width else str(values[name])

    if not isinstance(template, str):
        raise wanted.error(f"meta/info.json: a template of a path is {template!r}")
    text = _FIELD.sub(field, template)
    relative = Path(text)
    if "{" in text or relative.is_absolute() or ".." in relative.parts:
        raise wanted.error(f"meta/info.json: {template!r} is no path inside the dataset")
    return inside(root, root / relative, wanted)


# -------------------------------------------------------------------------------------------- episodes and rows


def _episodes(path: Path, info: Mapping[str, Any], wanted: Wanted) -> Iterator[Stretch]:
    if info["codebase_version"] == "v3.0":
        yield from _episodes_v3(path, info, wanted)
        return
    chunk = info.get("chunks_size", 1000)
    if type(chunk) is not int or chunk < 1:
        raise wanted.error(f"meta/info.json: chunks_size is {chunk!r}")
    file = path / "meta" / "episodes.jsonl"
    for line in filter(bytes.strip, _text(path, file, wanted).splitlines()):
        entry = _parsed(line, file, wanted)
        pair: list[Any] = [entry.get(key) if isinstance(entry, dict) else None for key in ("episode_index", "length")]
        index, length = pair
        _check_episode(index, length, wanted)
        place = {"episode_chunk": index // chunk, "episode_index": index}
        yield Stretch(index, length, place, _Everywhere(place))


class _Everywhere(dict[str, Any]):
    """In v2.1 each video of an episode is a file of its own, and its path has the numbers of the data's."""

    def __init__(self, place: Mapping[str, int]) -> None:
        super().__init__()
        self._place = dict(place)

    def __missing__(self, key: str) -> dict[str, Any]:
        return {**self._place, "from_timestamp": 0.0}


def _episodes_v3(path: Path, info: Mapping[str, Any], wanted: Wanted) -> Iterator[Stretch]:
    files = sorted((path / "meta" / "episodes").glob("chunk-*/file-*.parquet"))
    if not files:
        raise wanted.error("meta/episodes/chunk-000/file-000.parquet is missing")
    before = 0
    for file in files:
        with parquet_file(inside(path, file, wanted), wanted) as table:
            held = set(table.schema_arrow.names)
            plain = ["episode_index", "length", "data/chunk_index", "data/file_index"]
            plain += ["dataset_from_index", "dataset_to_index"]
            missing = [name for name in plain if name not in held]
            if missing:
                raise wanted.error(f"meta/episodes/{file.parent.name}/{file.name} has no column {missing[0]!r}")
            films = sorted({name.split("/")[1] for name in held if re.fullmatch(r"videos/[^/]+/chunk_index", name)})
            fields = ("chunk_index", "file_index", "from_timestamp")
            extra = [f"videos/{film}/{each}" for film in films for each in fields if f"videos/{film}/{each}" in held]
            columns = parquet_columns(table, file, plain + extra, replace(wanted, listen=_quiet))
        for row in range(len(columns["length"])):
            index, length, chunk, number, begin, end = (int(columns[name][row]) for name in plain)
            _check_episode(index, length, wanted)
            if (begin, end) != (before, before + length):
                raise wanted.error(f"episode {index} has rows {begin} to {end}, expected {before} to {before + length}")
            before = end
            videos = {
                film: {
                    each: columns[f"videos/{film}/{each}"][row].item()
                    for each in fields
                    if f"videos/{film}/{each}" in columns
                }
                for film in films
            }
            yield Stretch(index, length, {"chunk_index": chunk, "file_index": number}, videos)


def _check_episode(index: Any, length: Any, wanted: Wanted) -> None:
    if type(index) is not int or type(length) is not int or index < 0 or length < 1:
        raise wanted.error(f"episode {index!r} has length {length!r}")


def _columns(
    path: Path, info: Mapping[str, Any], stretches: Sequence[Stretch], keys: Sequence[str], wanted: Wanted
) -> dict[str, Any]:
    """The columns of all episodes, one after the other. Each file must hold the episodes that `meta` says, in order."""
    grown: dict[str, Growing] = {}
    whole, before = sum(stretch.length for stretch in stretches), 0
    for file, expected in _files(path, info, stretches, wanted):
        if not file.exists():
            raise wanted.error(f"{file.relative_to(path)} is missing, which episode {expected[0].index} is in")
        with parquet_file(file, wanted) as table:
            held = table.schema_arrow.names
            for key in (*keys, "episode_index"):
                if key not in held:
                    raise wanted.error(f"{file.relative_to(path)} has no column {key!r}")
            share = sum(stretch.length for stretch in expected) / whole
            scaled = replace(wanted, listen=partial(_further, wanted.listen, before / whole, share))
            found = parquet_columns(table, file, [*dict.fromkeys((*keys, "episode_index"))], scaled)
        before += sum(stretch.length for stretch in expected)
        ids = np.repeat([stretch.index for stretch in expected], [stretch.length for stretch in expected])
        if not np.array_equal(found["episode_index"].reshape(-1), ids):
            lengths = f"{len(found['episode_index']):,} rows, meta says {len(ids):,}"
            raise wanted.error(f"{file.relative_to(path)} does not hold the episodes that meta says ({lengths})")
        for key in keys:
            values = found[key]
            values = values[:, 0] if values.shape[1:] == (1,) else values
            growing = grown.setdefault(key, Growing(values.dtype))
            try:
                growing.append(values)
            except ValueError as error:
                raise wanted.error(f"{file.relative_to(path)}: {key!r}: {error}") from error
    return {key: growing.array() for key, growing in grown.items()}


def _quiet(share: float) -> None:
    """Progress in a small file, which nobody needs to see."""


def _further(listen: Callable[[float], None], before: float, share: float, done: float) -> None:
    """Progress in one file as progress in all."""
    listen(before + share * done)


def _files(
    path: Path, info: Mapping[str, Any], stretches: Sequence[Stretch], wanted: Wanted
) -> Iterator[tuple[Path, list[Stretch]]]:
    """The files of the data, each with its episodes."""
    begin = 0
    for index in range(1, len(stretches) + 1):
        if index == len(stretches) or stretches[index].data != stretches[begin].data:
            file = filled(path, info.get("data_path"), stretches[begin].data, wanted)
            yield file, list(stretches[begin:index])
            begin = index


# -------------------------------------------------------------------------------------------- videos


def video_frames(path: Path, key: str, episode: int, *, source: str | None = None) -> Iterator[np.ndarray]:
    """The frames [height, width, 3] of one episode of a LeRobot dataset, as bytes; needs the extra `lerobot`."""
    wanted = Wanted(str(path) if source is None else source)
    info = read_info(path, wanted)
    for stretch in _episodes(path, info, wanted):
        if stretch.index == episode:
            yield from _frames(path, info, stretch, key, wanted)
            return
    raise wanted.error(f"there is no episode {episode}")


def _all_frames(path: Path, info: Mapping[str, Any], stretches: Sequence[Stretch], key: str, wanted: Wanted) -> Any:
    growing = Growing(np.uint8)
    for stretch in stretches:
        for frame in _frames(path, info, stretch, key, wanted):
            growing.append(frame[None])
    return growing.array()


def _frames(path: Path, info: Mapping[str, Any], stretch: Stretch, key: str, wanted: Wanted) -> Iterator[np.ndarray]:
    """Decodes the frames of an episode, of which there must be as many as rows."""
    kind = (info["features"].get(key) or {}).get("dtype")
    if kind != "video":
        about_it = "is kept as pictures inside Parquet, which are not decoded" if kind == "image" else "is no video"
        raise wanted.error(f"{key!r} {about_it}")
    about = {**stretch.videos[key]} if isinstance(stretch.videos, _Everywhere) else stretch.videos.get(key)
    if about is None or info.get("video_path") is None:
        raise wanted.error(f"meta does not say where the video {key!r} of episode {stretch.index} is")
    file = filled(path, info["video_path"], {**about, "video_key": key}, wanted)
    if not file.exists():
        raise wanted.error(
            f"the video {file.relative_to(path)} is not there, so {key!r} cannot be read; the other keys can"
        )
    av = needed("av", "lerobot", f"{wanted.source}: {key!r} is a video, which")
    first, given = float(about.get("from_timestamp", 0.0)), 0
    try:
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            if first > 0 and stream.time_base:
                container.seek(int(first / stream.time_base), stream=stream)  # the key frame before it
            half = 0.5 / float(stream.average_rate or info.get("fps") or 30)
            for frame in container.decode(stream):
                if frame.time is None or frame.time < first - half:
                    continue
                if given == stretch.length:
                    break
                yield frame.to_ndarray(format="rgb24")
                given += 1
    except DemonstrationError:
        raise
    except Exception as error:  # ffmpeg raises many types on damaged bytes
        raise wanted.error(f"{file.relative_to(path)} cannot be decoded ({type(error).__name__}: {error})") from error
    if given != stretch.length:
        raise wanted.error(
            f"{file.relative_to(path)} has {given} frames for the {stretch.length} rows of episode {stretch.index}"
        )
