"""Reinforcement learning of a language-model agent on one page: what `agentrl train` does, without its machinery.

    python examples/loop.py

docs/loop.md explains it piece by piece, and says what the real loops add. loop_async.py is the asynchronous form.
"""

import asyncio
from itertools import islice
from statistics import fmean

import agentrl


async def train(settings, model_dir="runs/loop/model"):
    """Train as `settings` say, and save the policy."""
    async with agentrl.open_runtime(settings) as run:
        for step in range(settings.training.num_steps):
            # 1. Tasks, in an order that follows from the seed.
            tasks = islice(run.tasks, settings.flow.groups_per_step)

            # 2. A group of episodes for each task. The engine samples tokens, and notes the log-probability of each.
            played = await asyncio.gather(*(run.engines.play(task) for task in tasks))
            groups = [group for group in played if group.kept]  # too few episodes without a failure: nothing to compare

            # 3. An advantage for each sampled token: how much better its episode went than the others of its group.
            advantages = agentrl.advantages(groups, settings)

            # 4. One optimizer step on the policy loss. The learner computes the advantages itself, by the same function.
            result = await run.learner.train(step, [group.episodes for group in groups])

            # 5. The new weights go to the engines, so that the next step is sampled by the policy that it trains.
            await run.engines.publish(await run.learner.export_weights(step + 1))

            reward = fmean(group.reward for group in groups)
            print(f"step {step + 1}: reward {reward:.3f}, |advantage| {advantages.abs().mean():.3f}, loss {result.metrics['loss']:.4f}")
        await run.learner.save_model(model_dir)


if __name__ == "__main__":
    settings = agentrl.settings(  # every flag of `agentrl train`; the model is the bundled one unless model= names another
        "envs/calculator.py",
        num_steps=20,
        groups_per_step=16,  # tasks per step
        n_samples_per_prompt=8,  # episodes per task
        advantage_estimator="group_norm",  # GRPO: a reward is compared with those of the same task
        learning_rate=3e-4,
        max_new_tokens=32,
        runtime="local",  # engine and learner in this process
    )
    asyncio.run(train(settings))
