"""Films: what is written can be read again, and what is no film is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest

from cebm import films
from cebm.evaluation import evaluate
from cebm.films import write_film
from cebm.tasks import Forks, ParticleTask

FRAMES = [np.full((21, 30, 3), 40 * i, np.uint8) for i in range(5)]


class Ahead:
    """Always in the first direction."""

    def reset(self) -> None:
        pass

    def act(self, obs: np.ndarray) -> np.ndarray:
        return np.tile([1.0, 0.0], (len(obs), 1))


def test_a_gif_is_read_again(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="a GIF needs pillow")
    path = write_film(FRAMES, tmp_path / "folder/film.gif", rate=10)
    with image.open(path) as film:
        assert (film.n_frames, film.size, film.info["duration"]) == (5, (30, 21), 100)
        for i, frame in enumerate(FRAMES):
            film.seek(i)
            assert np.abs(np.asarray(film.convert("RGB"), int) - frame).max() <= 2


def test_an_mp4_is_read_again(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="an MP4 needs av")
    path = write_film(FRAMES, tmp_path / "film", rate=10)
    assert path.suffix == ".mp4"
    with av.open(str(path)) as film:
        read = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
    assert len(read) == 5 and read[0].shape == (22, 30, 3)
    assert all(abs(float(a.mean()) - float(b.mean())) < 5 for a, b in zip(read, FRAMES, strict=True))


def test_without_av_a_film_is_a_gif(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL.Image", reason="a GIF needs pillow")
    monkeypatch.setitem(sys.modules, "av", None)
    assert write_film(FRAMES, tmp_path / "film").suffix == ".gif"
    with pytest.raises(ImportError, match=r"cebm\[video\]"):
        write_film(FRAMES, tmp_path / "film.mp4")
    monkeypatch.setattr(films, "_module", lambda name: None)
    with pytest.raises(ImportError, match=r"cebm\[video\]"):
        write_film(FRAMES, tmp_path / "film")


def test_what_is_no_film_is_refused(tmp_path: Path) -> None:
    other = np.zeros((3, 3, 3), np.uint8)
    for frames in ([], [FRAMES[0], other], [other.astype(np.float32)], [other[0]]):
        with pytest.raises(ValueError, match="frames have the shapes"):
            write_film(frames, tmp_path / "film")
    with pytest.raises(ValueError, match="a film is a"):
        write_film(FRAMES, tmp_path / "film.avi")
    with pytest.raises(ValueError, match="rate"):
        write_film(FRAMES, tmp_path / "film.gif", rate=0)


@pytest.mark.parametrize("task", [Forks(), ParticleTask(steps=7)])
def test_our_tasks_are_filmed(task: Forks | ParticleTask) -> None:
    result = evaluate(Ahead(), task, episodes=3, film=(2,), latency_calls=0)
    frames = result.frames[2]
    assert len(frames) == result.rows[2]["length"] + 1 and frames[0].shape == (256, 256, 3)
    assert (frames[0] != frames[-1]).any() and "frames" not in repr(result)
