"""Pictures of episodes to files: an MP4 where the package av is there, else a GIF by pillow (the extra `video`)."""

from collections.abc import Sequence
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np


def write_film(frames: Sequence[np.ndarray], path: str | Path, rate: int = 10) -> Path:
    """Writes pictures [height, width, 3] of 8 bits, `rate` per second, and gives the file's name. Without a suffix in
    `path` the kind is what this machine can write; `.gif` and `.mp4` ask for one."""
    target = Path(path)
    shapes = {frame.shape for frame in frames}
    if len(shapes) != 1 or any(frame.dtype != np.uint8 for frame in frames) or len(next(iter(shapes))) != 3:
        raise ValueError(f"{target}: frames have the shapes {sorted(shapes)}, expected pictures of one size in uint8")
    if rate < 1:
        raise ValueError(f"rate must be at least 1, got {rate}")
    if target.suffix not in ("", ".gif", ".mp4"):
        raise ValueError(f"{target}: a film is a .gif or an .mp4")
    if not target.suffix:
        target = target.with_suffix(".gif" if _module("av") is None else ".mp4")
    target.parent.mkdir(parents=True, exist_ok=True)
    (_write_mp4 if target.suffix == ".mp4" else _write_gif)(frames, target, rate)
    return target


def _write_gif(frames: Sequence[np.ndarray], target: Path, rate: int) -> None:
    images = _module("PIL.Image")
    if images is None:
        raise ImportError("a film needs pillow or av: pip install 'cebm[video]'")
    first, *others = [images.fromarray(frame) for frame in frames]
    first.save(target, save_all=True, append_images=others, duration=round(1000 / rate), loop=0)


def _write_mp4(frames: Sequence[np.ndarray], target: Path, rate: int) -> None:
    av = _module("av")
    if av is None:
        raise ImportError("an MP4 needs av: pip install 'cebm[video]'")
    height, width = (side + side % 2 for side in frames[0].shape[:2])  # the codec wants even sides
    with av.open(str(target), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            room = ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0))
            picture = av.VideoFrame.from_ndarray(np.pad(frame, room, mode="edge"), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None
