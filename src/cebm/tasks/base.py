"""The contract of a task: where episodes come from, what an action may be, and what counts as good.

Everything above this room (evaluation, training, the report) asks a task for what is declared here and for nothing
else, so a task of one's own is a subclass of `Task`, or of `GymnasiumTask` where a Gymnasium environment exists.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32

from cebm.demonstrations import Demonstrations

# Episodes that choose a checkpoint and episodes that test it; demonstrations use small seeds.
VALIDATION_SEED = 1_000_001
TEST_SEED = 2_000_002

MOST_EPISODES = 1_000_000
"""The most episodes of one roll-out: more is a slip of the finger, and would not fit in memory."""

Value = float | bool | int | str | None
"""What a column of an episode's row holds; None where the episode does not tell. Words have no mean."""


class TaskError(ValueError):
    """A task cannot do what it was asked to do; the message names the task."""


@runtime_checkable
class Actor(Protocol):
    """What acts in a task: a `cebm.Runner`, or any object with these two methods."""

    def reset(self) -> Any:
        """A new batch of episodes begins: forget the last one."""

    def act(self, obs: np.ndarray) -> Any:
        """Actions [batch, act] for observations [batch, obs]; row `i` is the same episode in every call."""


@dataclass(frozen=True)
class RollOut:
    """What a roll-out gave."""

    rows: list[dict[str, Value]]
    """One per episode, all with the same columns. `episode` is its index; `success` is None where nobody tells."""
    last_obs: Float32[np.ndarray, "episodes obs"]
    """The last observation of every episode."""
    frames: dict[int, list[np.ndarray]] = field(default_factory=dict)
    """Pictures [height, width, 3] of the episodes that were filmed, by their index: the start and every step."""


@dataclass(frozen=True)
class Handle:
    """Something in a sketch that a person can drag: the agent, a goal, a block."""

    name: str
    """For people: "goal 1"."""
    columns: tuple[tuple[int, int], ...]
    """Columns of one observation that hold x and y of its points; they move together."""
    radius: float = 0.0
    """Size of the place around it that counts as reached; 0: a point."""


@dataclass(frozen=True)
class Sketch:
    """Where things are in one observation, seen from above, so that a person can move them."""

    low: tuple[float, float]
    """x and y of the corner with the smallest values."""
    high: tuple[float, float]
    """x and y of the opposite corner."""
    handles: tuple[Handle, ...]
    """What can be moved."""
    walls: tuple[tuple[float, float, float, float], ...] = ()
    """Lines that cannot be moved: x, y and x, y of their ends."""
    downwards: bool = False
    """Whether y grows downwards, as in a picture."""
    places: bool = False
    """Whether an action is a place in this plane, in the same units: it can then be drawn in the sketch."""


class Task(ABC):
    """An environment, the limits of its actions, its expert and its metrics.

    Subclasses are frozen dataclasses whose fields are the settings. `name`, `metric`, `limits` and `sizes` may be
    properties, class attributes, or fields with a default value.
    """

    @property
    def name(self) -> str:
        """Short, for people: "2-D particle task"."""
        return type(self).__name__

    @property
    @abstractmethod
    def metric(self) -> str:
        """The column of an episode's row whose mean chooses a checkpoint, or a metric of `summarise`; larger is
        better."""

    @property
    def limits(self) -> tuple[Float[np.ndarray, " act"], Float[np.ndarray, " act"]] | None:
        """Lowest and highest action; None where there are no limits, or the task does not know them."""
        return None

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Columns of an observation and of an action; None where the task does not know them."""
        return None

    @abstractmethod
    def roll_out(self, actor: Actor, episodes: int, seed: int, max_steps: int | None = None) -> RollOut:
        """Plays the first `episodes` episodes of `seed`, side by side, each for at most `max_steps` steps.

        `actor.reset()` is called before a batch of episodes begins. Episode `i` starts from a state that `(seed, i)`
        alone decides. A task may take two further arguments: `workers`, processes for its environments, and `film`,
        the indices of episodes whose pictures it keeps.
        """

    def summarise(self, rows: Sequence[dict[str, Value]]) -> dict[str, float]:
        """Metrics that no single episode has, from the rows of all of them: how evenly the ways are taken, for one.
        They have no standard error, and may choose a checkpoint as a column may."""
        return {}

    def demonstrations(self, episodes: int, seed: int) -> Demonstrations:
        """What the task's expert does in the first `episodes` episodes of `seed`; a TaskError where there is none."""
        advice = "load your own"
        if type(self).convert is not Task.convert:
            advice = "convert recordings of others with `cebm demos TASK --from PATH --out OUT`"
        raise TaskError(f"{self.name} has no expert, so it cannot give demonstrations; {advice}")

    def convert(self, source: Path) -> Demonstrations:
        """What others recorded in this task, as they published it, with this task's observations and actions; a
        TaskError where no such recording is known."""
        raise TaskError(f"{self.name} knows no recordings of others; read {source} as data of your own instead")

    def scene(self, actor: Actor, episodes: int) -> dict[str, Any] | None:
        """The held-out episodes (`TEST_SEED`) of the actor beside the expert's, as plain data that the report's page
        draws. None: the task has no picture of its own, and the report shows the energy on validation pairs.

        The keys, all of them values that JSON can hold:

        - `episodes`: a list with one dict per episode: `index`; `success`; `remark`, a few words on how it ended;
          `goals`, two points; `policy` and `expert`, the paths [steps + 1, 2]; `aims` and `expert_aims`, the actions
          [steps, 2]; `distances` and `expert_distances`, to both goals [steps + 1, 2];
        - in an episode `distances` and `expert_distances` may be left out, and `goals` may be empty;
        - `walls`, which may be left out: a list of lines to draw, each as x, y of its ends;
        - `shown`: the index of the episode to show first, which is also the one of `moments`;
        - `steps`, `dim`, `radius`: the length of an episode, the dimensions of its space, the size of a goal;
        - `successes`, `expert_successes`: numbers of episodes;
        - `note`: sentences for the caption, on what success means and what the picture leaves out;
        - `moments`: a list of observations at which to draw the energy, each a dict: `title`; `step`; `obs`, all
          observations of the episode up to this step [step + 1, obs], so that a policy with a history of `n` takes
          the last `n` of them (the first is repeated where there are fewer); and `marks`, a list of
          `(kind, place, radius)` in the units of actions.

        What the actor was (the number of its candidates, say) is known to the caller and not repeated here.
        """
        return None

    @property
    def sketch(self) -> Sketch | None:
        """How a person sees and changes one observation in `cebm studio`; None where the task does not say."""
        return None

    def check_policy(self, obs_dim: int, act_dim: int) -> None:
        """A ValueError where a policy has other sizes than the task; nothing where the task does not know its own."""
        if self.sizes is not None and self.sizes != (obs_dim, act_dim):
            raise ValueError(
                f"{self.name}: env has {self.sizes[0]} observation and {self.sizes[1]} action dimensions, "
                f"the policy {obs_dim} and {act_dim}"
            )


def check_episodes(episodes: int) -> int:
    """A whole number of episodes that a machine can play."""
    try:
        count = operator.index(episodes)
    except TypeError as error:
        raise ValueError(f"episodes must be a whole number, got {episodes!r}") from error
    if count < 1:
        raise ValueError(f"episodes must be at least 1, got {count}")
    if count > MOST_EPISODES:
        raise ValueError(f"episodes must be at most {MOST_EPISODES:,}, got {count:,}")
    return count


def check_max_steps(max_steps: int | None) -> None:
    """None, or a whole number of steps."""
    if max_steps is None:
        return
    if isinstance(max_steps, bool) or not isinstance(max_steps, int | np.integer) or max_steps < 1:
        raise ValueError(f"max_steps must be a whole number of at least 1, or None, got {max_steps!r}")
