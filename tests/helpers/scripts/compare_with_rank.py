"""Collects the same frames with policies in workers and on the server of a rank, and compares."""

import gymnasium as gym
import numpy as np
import torch
from torch.distributions import Categorical

import distcollect as dc

NUM_ENVS, T, NUM_BATCHES = 4, 16, 4


class Choice(gym.spaces.Discrete):
    """A space that no module has."""


class Pictures(gym.Env):
    """Its observations are too large to lie within a packet's pickle."""

    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (64, 64, 3), np.uint8),
        speed=gym.spaces.Box(-1, 1, (2,), np.float32),
    )
    action_space = Choice(5)

    def _observe(self):
        image = self.np_random.integers(0, 256, (64, 64, 3)).astype(np.uint8)
        return {"image": image, "speed": self.np_random.uniform(-1, 1, 2).astype(np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 9))
        return self._observe(), {}

    def step(self, action):
        self.left -= 1
        return self._observe(), float(action), self.left == 0, False, {}


class Drawing(torch.nn.Module):
    """It is recurrent, and draws where its episodes begin."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 5)

    def initial_state(self, num_envs):
        return {"memory": torch.rand(num_envs)}

    def forward(self, observation, memory):
        mean = observation["image"].float().mean((1, 2, 3)) / 255
        read = torch.cat([observation["speed"], (mean + memory)[:, None]], 1)
        return Categorical(logits=self.inner(read)), {"memory": memory / 2 + mean}


def collected(policy, inference):
    with dc.RPCDataCollector(
        Pictures,
        policy,
        envs_per_worker=NUM_ENVS,
        frames_per_batch=dc.num_workers(0) * NUM_ENVS * T,
        sync=True,
        inference=inference,
    ) as collector:
        collector.set_seed(7)
        return [collector.next(60).clone() for _ in range(NUM_BATCHES)]


def main():
    torch.manual_seed(0)
    policy = Drawing()
    own = collected(policy, None)
    served = collected(policy, dc.Inference("rank", ranks=[1], batch_size=NUM_ENVS))
    for like, batch in zip(own, served, strict=True):
        assert set(batch.keys(True, True)) == set(like.keys(True, True))
        for key in like.keys(True, True):
            if key != ("collector", "traj_ids"):
                assert torch.equal(batch[key], like[key]), key
    workers = len(own[0]["collector", "worker_id"].unique())
    print(f"{workers} workers: the same", flush=True)


if __name__ == "__main__":
    dc.run(main)
