"""How many threads a training takes: as many as are fastest now, as measured on its own steps.

The threads of torch share every operation and wait for the slowest of them. Where another program has taken a core, one
thread is then as fast as several, or faster.
"""

import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from time import perf_counter

SECONDS, ROUNDS = 0.15, 4
"""A measurement takes at least so long, as a scheduler hands cores over every few milliseconds; and so many times."""
SPINS = "1000"
"""How often a waiting thread looks before it sleeps (GOMP_SPINCOUNT), as OpenMP itself does where it knows that there
are more threads than cores: some microseconds. Spinning for long, it keeps its core from the thread it waits for."""
WORTH = 1.03
"""A larger number of threads must be so much faster than a smaller one."""


def wait_shortly(environment: MutableMapping[str, str]) -> None:
    """Lets waiting threads spin for a moment only, unless the environment says how they wait. OpenMP reads this once,
    when torch is imported."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


def open_number() -> bool:
    """Whether the number of threads is ours to choose: nobody has set it."""
    import torch

    return "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > 1


@dataclass(frozen=True)
class Choice:
    """A number of threads, and what each number reached."""

    threads: int
    rates: dict[int, float]
    """Calls per second, by the number of threads."""

    def words(self) -> str:
        """What was chosen, for people."""
        best = self.rates[self.threads]
        others = [f"{count} would be {100 * rate / best:.0f} % as fast" for count, rate in self.rates.items()]
        others = [text for count, text in zip(self.rates, others, strict=True) if count != self.threads]
        return f"{self.threads} thread{'' if self.threads == 1 else 's'}, as measured now: {', '.join(others)}"


def counts(most: int) -> list[int]:
    """The numbers to try: powers of two up to `most`, and `most`."""
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def choose(work: Callable[[], object], most: int, seconds: float = SECONDS, rounds: int = ROUNDS) -> Choice:
    """Measures `work` with 1, 2, 4 … up to `most` threads, in turns, and leaves torch with the fastest number."""
    import torch

    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    tried = counts(most)
    calls, took = dict.fromkeys(tried, 0), dict.fromkeys(tried, 0.0)
    for number in range(rounds + 1):
        for count in tried:
            torch.set_num_threads(count)
            began = perf_counter()
            done = 0
            while not done or (number and perf_counter() - began < seconds):
                work()
                done += 1
            if number:  # the first round starts the threads
                calls[count] += done
                took[count] += perf_counter() - began
    rates = {count: calls[count] / took[count] for count in tried}
    best = tried[0]
    for count in tried[1:]:
        if rates[count] > WORTH * rates[best]:
            best = count
    torch.set_num_threads(best)
    return Choice(best, rates)
