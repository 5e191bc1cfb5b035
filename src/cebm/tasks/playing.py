"""Episodes of a Gymnasium task under way: in this process, or in several others that step the environments in parallel
while one policy acts here on the whole batch. Both give the same rows.
"""

import multiprocessing
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from traceback import format_exception_only
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space
from jaxtyping import Bool, Float, Float32, Float64

from cebm.tasks.base import Actor, TaskError, Value

if TYPE_CHECKING:
    from cebm.tasks.gym import GymnasiumTask

MOST_STEPS = 10_000
"""The limit of an episode where nobody sets one."""


@runtime_checkable
class Players(Protocol):
    """Episodes side by side; row `i` is the same episode throughout."""

    name: str
    """Of the task, for messages."""
    indices: Sequence[int]
    """The number of each episode."""
    act_dim: int

    @property
    def obs(self) -> Float32[np.ndarray, "episodes obs"]:
        """What each episode shows; one that ended keeps its last observation."""

    @property
    def running(self) -> Bool[np.ndarray, " episodes"]:
        """Which episodes are not over."""

    def step(self, actions: Float64[np.ndarray, "episodes act"]) -> None:
        """Steps those that are running."""

    def rows(self) -> list[dict[str, Value]]:
        """What each episode was worth."""

    def frames(self) -> dict[int, list[np.ndarray]]:
        """The pictures of the episodes that were filmed."""


def play(actor: Actor, players: Players) -> None:
    """Episodes advance together so that the actor acts on a batch; those that ended are stepped no more."""
    actor.reset()
    steps = 0
    while players.running.any():
        # The whole batch acts, so that history and chunks stay aligned.
        players.step(_check_actions(actor.act(players.obs), players, steps))
        steps += 1


def _check_actions(actions: Any, players: Players, steps: int) -> Float64[np.ndarray, "episodes act"]:
    array = np.asarray(actions, np.float64)
    expected = (len(players.indices), players.act_dim)
    if array.shape != expected:
        raise ValueError(f"{players.name}: actions have shape {array.shape}, expected {expected}")
    bad = players.running[:, None] & ~np.isfinite(array)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        where = f"{players.name}: episode {players.indices[row]}, step {steps}"
        raise ValueError(f"{where}: action column {column} is {array[row, column]}")
    return array


class Here:
    """Episodes whose environments are in this process."""

    def __init__(
        self,
        task: "GymnasiumTask",
        indices: Sequence[int],
        envs: Sequence[gymnasium.Env],
        seed: int,
        limit: int | None,
        film: Collection[int] = (),
    ) -> None:
        self.name, self.indices = task.name, indices
        self.episodes = [Episode(task, i, env, seed, limit, i in film) for i, env in zip(indices, envs, strict=True)]
        first = self.episodes[0]
        for episode in self.episodes:
            if (len(episode.obs), episode.action_space.shape) != (len(first.obs), first.action_space.shape):
                raise ValueError(
                    f"{task.name}: the spaces of episode {episode.index} have other sizes than those of "
                    f"episode {first.index}"
                )
        self.act_dim = columns_of(first.action_space)

    @property
    def obs(self) -> Float32[np.ndarray, "episodes obs"]:
        return np.stack([episode.obs for episode in self.episodes])

    @property
    def running(self) -> Bool[np.ndarray, " episodes"]:
        return np.array([episode.running for episode in self.episodes])

    def step(self, actions: Float64[np.ndarray, "episodes act"]) -> None:
        for episode, action in zip(self.episodes, actions, strict=True):
            if episode.running:
                episode.step(action)

    def rows(self) -> list[dict[str, Value]]:
        return [episode.row() for episode in self.episodes]

    def frames(self) -> dict[int, list[np.ndarray]]:
        return {episode.index: episode.frames for episode in self.episodes if episode.frames is not None}


class Elsewhere:
    """Episodes whose environments are in other processes, one share of the batch in each. Rows and pictures are those
    that `Here` gives: an episode is decided by the task, its seed and the actions alone."""

    def __init__(
        self,
        task: "GymnasiumTask",
        indices: Sequence[int],
        seed: int,
        limit: int | None,
        film: Collection[int],
        workers: int,
    ) -> None:
        self.name, self.indices = task.name, indices
        self._shares = [np.arange(worker, len(indices), workers) for worker in range(min(workers, len(indices)))]
        # Forked: a task may be made of a user's function, or of a class from a file, which no other process can import.
        # The children step environments and touch nothing of torch.
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for share in self._shares:
                mine, theirs = context.Pipe()
                arguments = (
                    task,
                    [indices[i] for i in share.tolist()],
                    seed,
                    limit,
                    film,
                    theirs,
                    [*self._pipes, mine],
                )
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(mine)
                self._processes.append(process)
            begun = [self._receive(worker) for worker in range(len(self._shares))]
        except BaseException:
            self.close()
            raise
        widths = {(obs.shape[1], act_dim) for obs, act_dim in begun}
        if len(widths) > 1:
            self.close()
            raise ValueError(f"{task.name}: the spaces of its episodes have different sizes: {sorted(widths)}")
        [(width, self.act_dim)] = widths
        self._obs = np.zeros((len(indices), width), np.float32)
        self._running = np.ones(len(indices), np.bool_)
        for share, (obs, _) in zip(self._shares, begun, strict=True):
            self._obs[share] = obs

    @property
    def obs(self) -> Float32[np.ndarray, "episodes obs"]:
        return self._obs.copy()

    @property
    def running(self) -> Bool[np.ndarray, " episodes"]:
        return self._running

    def step(self, actions: Float64[np.ndarray, "episodes act"]) -> None:
        busy = [worker for worker, share in enumerate(self._shares) if self._running[share].any()]
        for worker in busy:
            self._pipes[worker].send(actions[self._shares[worker]])
        for worker in busy:
            share = self._shares[worker]
            self._obs[share], self._running[share] = self._receive(worker)

    def rows(self) -> list[dict[str, Value]]:
        found: list[Any] = [None] * len(self.indices)
        for share, rows in zip(self._shares, self._ask("rows"), strict=True):
            for i, row in zip(share, rows, strict=True):
                found[i] = row
        return found

    def frames(self) -> dict[int, list[np.ndarray]]:
        return {index: frames for part in self._ask("frames") for index, frames in part.items()}

    def close(self) -> None:
        """Ends the processes; their environments are closed there. An error of closing is raised."""
        problems = []
        for worker, pipe in enumerate(self._pipes):
            try:
                pipe.send(None)
                self._receive(worker)
            except (OSError, TaskError) as error:
                problems.append(error)
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        told = [error for error in problems if isinstance(error, TaskError)]
        if told:
            raise told[0]

    def _ask(self, question: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(question)
        return [self._receive(worker) for worker in range(len(self._pipes))]

    def _receive(self, worker: int) -> Any:
        """What a worker answers; an error of its environment arrives as words, and is raised as a TaskError."""
        try:
            answer, problem = self._pipes[worker].recv()
        except EOFError as error:
            episodes = [self.indices[i] for i in self._shares[worker].tolist()]
            raise TaskError(f"{self.name}: the process with the episodes {episodes} ended without a word") from error
        if problem is not None:
            raise TaskError(problem)
        return answer


def _serve(
    task: "GymnasiumTask",
    indices: Sequence[int],
    seed: int,
    limit: int | None,
    film: Collection[int],
    pipe: Connection,
    others: Sequence[Connection],
) -> None:
    """A worker: steps its share of the episodes until it is told to stop. `others`: the parent's ends, which a fork
    inherits; they are closed, so that a parent's death is noticed."""
    for other in others:
        other.close()
    try:
        with task.opened(indices) as envs:
            players = Here(task, indices, envs, seed, limit, film)
            pipe.send(((players.obs, players.act_dim), None))
            while (wanted := pipe.recv()) is not None:
                if isinstance(wanted, str):
                    answer: Any = getattr(players, wanted)()
                else:
                    players.step(wanted)
                    answer = players.obs, players.running
                pipe.send((answer, None))
        pipe.send((None, None))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except BaseException as error:
        notes = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        pipe.send((None, notes))


class Episode:
    """An episode under way: steps its environment, checks what comes back, and keeps the numbers for its row."""

    def __init__(
        self, task: "GymnasiumTask", index: int, env: gymnasium.Env, seed: int, limit: int | None, film: bool
    ) -> None:
        self.task, self.index, self.env = task, index, env
        self.observation_space, self.action_space = check_spaces(env, f"{task.name}: episode {index}")
        registered = None if env.spec is None else env.spec.max_episode_steps
        self.limit = limit or registered or MOST_STEPS
        # Infos may be large: they are kept only for a `measure` that reads them.
        self.measured = task.measures
        self.rewards: list[float] = []
        self.infos: list[dict[str, Any]] = []
        self.last: dict[str, float] = {}
        self.largest: dict[str, float] = {}
        self.success: bool | None = None
        self.running, self.cut = True, False
        self.frames: list[np.ndarray] | None = [] if film else None
        with self._named():
            obs, _ = env.reset(seed=episode_seed(seed, index))
        self.obs = self._flat(obs)
        self._check_finite(self.obs)
        self._film()

    def step(self, action: Float[np.ndarray, " act"]) -> None:
        space = self.action_space
        action = np.clip(action, space.low.ravel(), space.high.ravel())
        if np.issubdtype(space.dtype, np.integer):
            action = np.rint(action)
        with self._named():
            obs, reward, terminated, truncated, info = self.env.step(action.reshape(space.shape).astype(space.dtype))
            self._note(info)
            self.rewards.append(float(reward))
            self._film()
        over = bool(terminated or truncated)
        self.cut = not over and len(self.rewards) >= self.limit
        self.running = not (over or self.cut)
        flat = self._flat(obs)
        if self.running:
            self._check_finite(flat)
        # The batch stays aligned: an episode that has ended keeps its last observation, the last finite one.
        if np.isfinite(flat).all():
            self.obs = flat

    def row(self) -> dict[str, Value]:
        rewards = np.array(self.rewards)
        row: dict[str, Value] = {
            "episode": self.index,
            "success": self.success,
            "length": len(rewards),
            "return_sum": float(sum(self.rewards)),
            "return_max": float(rewards.max()),
            "return_last": self.rewards[-1],
            "return_mean": sum(self.rewards) / len(rewards),
            "truncated_by_limit": self.cut,
        }
        row |= {f"info_{name}": value for name, value in self.last.items()}
        for name, value in self.largest.items():
            row.setdefault(f"info_{name}_max", value)  # an info that is itself called NAME_max goes first
        if not self.measured:
            return row
        own = self.task.measure(self.rewards, self.infos)
        for name, value in own.items():
            number = _number(value)
            if number is None:
                raise ValueError(
                    f"{self.task.name}: episode {self.index}: measure gave {name} = {value!r}, expected a number"
                )
            row[name] = bool(number) if name == "success" else number
        return row

    def _film(self) -> None:
        if self.frames is None:
            return
        try:
            frame = np.asarray(self.env.render())
        except NotImplementedError as error:
            raise ValueError(f"{self.here()}: the environment cannot be filmed, it has no `render`") from error
        except Exception as error:  # whatever its graphics raise, and those of some have no words of their own
            words = "".join(format_exception_only(error)).strip()
            raise ValueError(f"{self.here()}: the environment cannot be filmed: render failed: {words}") from error
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(
                f"{self.here()}: the environment cannot be filmed: render gave {frame.dtype} {frame.shape}, expected "
                "a picture; make it with render_mode='rgb_array'"
            )
        self.frames.append(frame.copy())

    def _note(self, info: dict[str, Any]) -> None:
        if self.measured:
            self.infos.append(dict(info))  # a copy: environments may write the next info into the same dict
        told = info.get("success", info.get("is_success"))
        if told is not None:
            self.success = bool(told)
        for name, value in info.items():
            number = _number(value)
            if number is not None:
                self.last[name] = number
                self.largest[name] = float(np.fmax(number, self.largest.get(name, number)))  # NaN is not the largest

    def _flat(self, obs: Any) -> Float32[np.ndarray, " obs"]:
        flat = np.concatenate([np.zeros(0), *_parts(obs, self.observation_space, self.here(), ())])
        with np.errstate(over="ignore"):  # what overflows is infinite, and that is reported
            return flat.astype(np.float32)

    def _check_finite(self, obs: Float32[np.ndarray, " obs"]) -> None:
        bad = np.flatnonzero(~np.isfinite(obs))
        if bad.size:
            raise ValueError(f"{self.here()}: observation column {bad[0]} is {obs[bad[0]]}")

    def here(self) -> str:
        return f"{self.task.name}: episode {self.index}, step {len(self.rewards)}"

    @contextmanager
    def _named(self) -> Iterator[None]:
        """An error of the environment is raised as it is, with a note on the episode and the step."""
        try:
            yield
        except Exception as error:
            error.add_note(f"{self.here()}: the environment failed")
            raise


def episode_seed(seed: int, episode: int) -> int:
    """Not seed + episode: neighbouring seeds would share nearly all of their episodes."""
    return int(np.random.SeedSequence(seed, spawn_key=(episode,)).generate_state(1)[0])


def check_spaces(env: gymnasium.Env, where: str) -> tuple[Space, Box]:
    observation, action = env.observation_space, env.action_space
    if not isinstance(action, Box):
        raise ValueError(f"{where}: env has a {type(action).__name__} action space, a policy needs a Box")
    for path, part in _leaves(observation, ()):
        if not isinstance(part, Box):
            place = f" at {'/'.join(path)!r} in its observation space" if path else " observation space"
            raise ValueError(
                f"{where}: env has a {type(part).__name__}{place}, a policy needs a Box or a Dict of Boxes"
            )
    return observation, action


def _leaves(space: Space, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Space]]:
    """The spaces within Dicts, in their order."""
    if not isinstance(space, Dict):
        yield path, space
        return
    for key, part in space.spaces.items():
        yield from _leaves(part, (*path, str(key)))


def columns_of(space: Space) -> int:
    return sum(int(np.prod(part.shape or ())) for _, part in _leaves(space, ()))


def _parts(obs: Any, space: Space, where: str, path: tuple[str, ...]) -> Iterator[np.ndarray]:
    """The flat pieces of an observation, in the space's order."""
    named = f"observation {'/'.join(path)!r}" if path else "the observation"
    if isinstance(space, Dict):
        for key, part in space.spaces.items():
            if not hasattr(obs, "keys") or key not in obs:
                raise ValueError(f"{where}: {named} has no {key!r}, which its space has")
            yield from _parts(obs[key], part, where, (*path, str(key)))
        return
    flat = np.ravel(np.asarray(obs, np.float64))
    if len(flat) != int(np.prod(space.shape or ())):
        raise ValueError(f"{where}: {named} has shape {np.shape(obs)}, its space has {space.shape}")
    yield flat


def _number(value: Any) -> float | None:
    """A real scalar as a float; None for anything else."""
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        return float(value)
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "biuf":
        return float(value)
    return None
