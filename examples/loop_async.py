"""Asynchronous reinforcement learning on one page: episodes, training and publication at the same time, with bounded staleness.

    python examples/loop_async.py

Three loops share a line of groups and a number of slots:

    admit -> line of groups, oldest first -> learn -> publish
      ^                                                  |
      +-------- a slot for each group that was trained --+

A group takes one of (S + 1) x G slots before it begins, where a step trains on G groups, and its slot is free again when the weights
trained on it are live. Groups are trained in the order in which they began. So a group of step k begins with weights of version k - S or
newer, and no token is older than S versions when it is trained. With S = 0 this is loop.py. docs/loop.md says more.
"""

import asyncio
from itertools import islice
from statistics import fmean

import agentrl


async def admit(run, settings, slots, line, tasks):
    """Begin groups as fast as there are slots; unblocked by `publish`."""
    for task in islice(run.tasks, settings.training.num_steps * settings.flow.groups_per_step):
        await slots.acquire()
        await line.put(tasks.create_task(run.engines.play(task)))


async def learn(run, settings, line, exported, rows):
    """Train on the oldest groups, step after step, while `admit` and the engines go on; unblocked by the end of the oldest group."""
    for step in range(settings.training.num_steps):
        # In order of admission, not of arrival: otherwise fast groups would overtake slow ones, whose tokens age meanwhile.
        played = [await (await line.get()) for _ in range(settings.flow.groups_per_step)]
        groups = [group for group in played if group.kept]
        staleness = max((step - group.versions[0] for group in groups), default=0)
        assert staleness <= settings.flow.staleness, f"step {step} would train on tokens that are {staleness} versions old"

        # Advantages, the policy loss, a step; tokens of older weights are weighted by their importance ratios (--off-policy).
        result = await run.learner.train(step, [group.episodes for group in groups])
        reward = fmean(group.reward for group in groups)
        rows.append({"reward": reward, "staleness": staleness, **result.metrics})
        print(f"step {step + 1}: reward {reward:.3f}, staleness up to {staleness}, loss {result.metrics['loss']:.4f}")

        await exported.join()  # one version at a time is on its way
        await exported.put(await run.learner.export_weights(step + 1))


async def publish(run, settings, slots, exported):
    """Load weights into the engines, in the middle of episodes, and free the slots of the groups that they were trained on."""
    for _ in range(settings.training.num_steps):
        await run.engines.publish(await exported.get())
        for _ in range(settings.flow.groups_per_step):
            slots.release()
        exported.task_done()


async def train(settings, model_dir="runs/loop_async/model"):
    """Run the three loops until the last step is published, save the policy, and return the metrics of each step."""
    slots = asyncio.Semaphore((settings.flow.staleness + 1) * settings.flow.groups_per_step)
    line, exported, rows = asyncio.Queue(), asyncio.Queue(), []
    async with agentrl.open_runtime(settings) as run:
        async with asyncio.TaskGroup() as tasks:  # an error in one of them ends the others
            tasks.create_task(admit(run, settings, slots, line, tasks))
            tasks.create_task(learn(run, settings, line, exported, rows))
            tasks.create_task(publish(run, settings, slots, exported))
        await run.learner.save_model(model_dir)
    return rows


if __name__ == "__main__":
    settings = agentrl.settings(
        "envs/calculator.py",
        num_steps=20,
        max_staleness=1,  # S
        groups_per_step=16,  # G
        n_samples_per_prompt=8,
        learning_rate=3e-4,
        max_new_tokens=32,
        runtime="local",
    )
    asyncio.run(train(settings))
