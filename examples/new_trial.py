"""A recipe of your own: change what you like of one that is there, or fill in a Trial. Run me: I take a minute."""

from dataclasses import replace

from cebm import TRIALS, Job, Langevin, Network, ParticleTask, train

recipe = replace(
    TRIALS["ibc"],
    network=Network(width=64),
    sampler=Langevin("ibc", steps=5, noise=0.03),  # closer negatives, shorter chains
    gradient_penalty=1.0,
    gradient_margin=10.0,  # bounded energies
    ema=0.99,  # averaged weights act
)
job = Job("mine", recipe, task=ParticleTask(dim=1), episodes=50, steps=60, evaluate_every=30, evaluation_episodes=20)

if __name__ == "__main__":
    outcome = train(job, "runs/mine", listen=lambda row: print(row) if row["kind"] == "evaluation" else None)
    print(outcome.best_step, outcome.policy.act(outcome.policy.obs_box.centre.numpy()))
