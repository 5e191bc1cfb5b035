"""The front page's moving picture: `python -m docs.site.moving` trains a policy and films one episode of it.

The expert visits the two goals in random order, so that at the start of an episode both are right.
"""

import io
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

import cebm

OUT = Path(__file__).parents[2] / "docs/moving.gif"
SIDE, LEVELS = 61, 14


def landscape(policy: cebm.EnergyPolicy, obs: np.ndarray) -> np.ndarray:
    """The energy above its minimum over the places that an action may name, from 0 to 1."""
    axis = torch.linspace(0, 1, SIDE)
    places = policy.act_box.normalise(torch.cartesian_prod(axis, axis))
    with torch.no_grad():
        energies = policy.energy(policy.obs_box.normalise(torch.as_tensor(obs)[None]), places[None])[0]
    return (energies - energies.min()).reshape(SIDE, SIDE).T.numpy()


def frame(
    policy: cebm.EnergyPolicy, obs: np.ndarray, proposal: cebm.Proposal, trail: np.ndarray, top: float
) -> Image.Image:
    """The scene on the left, the landscape with the candidates on the right."""
    figure = Figure(figsize=(6.4, 3.4), dpi=100, layout="constrained")
    scene, plane = figure.subplots(1, 2)
    axis = np.linspace(0, 1, SIDE)
    goals = obs[-4:].reshape(2, 2)
    scene.plot(*trail.T, color="#0072B2", alpha=0.5)
    scene.plot(*trail[-1], "o", color="#0072B2", markersize=11)
    plane.contourf(axis, axis, np.sqrt(np.minimum(landscape(policy, obs), top)), LEVELS, cmap="viridis")
    plane.plot(*proposal.candidates[0].T, ".", color="white", markersize=5)
    plane.plot(
        *proposal.action[0], "o", markersize=13, markerfacecolor="none", markeredgecolor="#E69F00", markeredgewidth=2.5
    )
    for axes, colour, title in (
        (scene, "#D55E00", "the scene"),
        (plane, "white", "energy of each action: dark is likely"),
    ):
        axes.plot(*goals.T, "x", color=colour, markersize=10, markeredgewidth=2.5)
        axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=[], yticks=[])
        axes.set_title(title, fontsize=10)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return Image.open(drawn).convert("RGB")


def main(steps: int = 2500, seed: int = 3) -> None:
    """Writes the film. It plays three times and stops, as what moves for ever keeps readers from the text."""
    task = cebm.ParticleTask(random_order=True)
    policy = cebm.fit(task.demonstrations(1000, 0), steps=steps, limits=task.limits)
    generator = torch.Generator().manual_seed(0)
    for index in range(100):  # the first episode in which it visits both goals
        env = cebm.BatchedParticle(task)
        obs, trail, seen = env.reset(seed, [index]), [], []
        while not env.done:
            proposal = policy.propose(obs[0], generator=generator)
            trail.append(obs[0, :2].copy())
            seen.append((obs[0], proposal, np.array(trail)))
            obs = env.step(proposal.action.numpy())
        if env.outcome().success[0]:
            break
    frames = [frame(policy, *each, top=60.0) for each in seen[::2]]
    palette = frames[0].quantize(64)
    small = [each.quantize(palette=palette, dither=Image.Dither.NONE) for each in frames]
    small[0].save(OUT, save_all=True, append_images=small[1:], duration=140, loop=2, optimize=True)


if __name__ == "__main__":
    main()
