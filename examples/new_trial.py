"""A recipe of your own: change what you like of one that is there, or compose a Trial. Run me: I take a minute."""

from cebm import TRIALS, GradientPenalty, Job, ParticleTask, train, vary

recipe = vary(
    TRIALS["ibc"],
    width=64,
    penalties=(GradientPenalty(1.0, margin=10.0),),  # bounded energies
    average=0.99,  # averaged weights act
    **{"objective.source.sampler.steps": 5, "objective.source.sampler.noise": 0.03},  # shorter chains, closer negatives
)
job = Job("mine", recipe, task=ParticleTask(dim=1), episodes=50, steps=60, evaluate_every=30, evaluation_episodes=20)

if __name__ == "__main__":
    outcome = train(job, "runs/mine", listen=lambda row: print(row) if row["kind"] == "evaluation" else None)
    print(outcome.best_step, outcome.policy.act(outcome.policy.obs_box.centre.numpy()))
