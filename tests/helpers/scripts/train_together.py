"""Two trainers, each with its own workers, train one policy together."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distcollect as dc


class Policy(nn.Module):
    """Shows its weight in each frame."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, observation):
        shown = self.weight.expand(len(observation))
        return torch.zeros(len(observation), dtype=torch.int64), {"weight": shown}


def main():
    dist.init_process_group("gloo")
    rank, num_trainers = dist.get_rank(), dist.get_world_size()
    policy = Policy()
    trained = DistributedDataParallel(policy)
    optimiser = torch.optim.SGD(policy.parameters(), lr=1.0)
    seen = []
    with dc.RPCDataCollector("CartPole-v1", policy, frames_per_batch=40, sync=True) as collector:
        workers = collector.num_workers
        assert workers == dc.num_workers(default=0)
        for _ in range(3):
            batch = collector.next()
            ids = batch["collector", "traj_ids"].unique().tolist()
            versions = batch["collector", "policy_version"].unique().tolist()
            seen.append((ids, versions, batch["weight"].unique().tolist()))
            # The gradients of the trainers, -1 and -3, are averaged: each step adds 2.
            _, extras = trained(batch["observation"].reshape(-1, 4))
            (-(1 + 2 * rank) * extras["weight"].mean()).backward()
            optimiser.step()
            optimiser.zero_grad()
            collector.update_policy_weights_()
    everything = [None] * num_trainers
    dist.all_gather_object(everything, (workers, seen))
    if rank == 0:
        print(json.dumps({"trainers": everything}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    dc.run(main, num_trainers=2)
