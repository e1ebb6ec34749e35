"""Two trainers: the first hands rollouts over to the second, then loses its worker."""

import json
import os
import signal
import time
from dataclasses import replace

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import distcollect as dc
from distcollect.common.peer_ids import TRAJ_IDS_PER_PEER
from distcollect.transport.copying import Copier
from distcollect.transport.protocol import INLINE_BYTES

SOON_S = 60
FRAMES = 50


class Counting(gym.Env):
    """Observes the number of all its steps, 2000 times."""

    observation_space = gym.spaces.Box(0, 1e9, (2000,), np.float32)
    action_space = gym.spaces.Discrete(2)
    count = 0

    def _observe(self):
        return np.full(self.observation_space.shape, self.count, np.float32)

    def reset(self, *, seed=None, options=None):
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        return self._observe(), 1.0, False, False, {}


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, observation):
        return torch.zeros(len(observation), dtype=torch.int64)


received = []


def count_received():
    """Record the bytes of rollouts that arrive in this process."""
    copy = Copier.deliver

    def counting(self, peer, memory, sent, deliver):
        received.append(sum(tensor.nbytes for tensor in sent))
        copy(self, peer, memory, sent, deliver)

    Copier.deliver = counting


def wait_until(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hand_over(collector):
    """Pairs: a rollout's reference, and what the second trainer should find."""
    ledger = lambda: collector.ledger.total  # noqa: E731
    collector.update_policy_weights_()

    def send(reference):
        assert reference.tensors is None
        assert reference.num_bytes > INLINE_BYTES
        dist.send_object_list([reference], dst=1)
        answer = [None]
        dist.recv_object_list(answer, src=1)
        return answer[0]

    taken = []
    for _ in range(3):
        reference = collector.hand_over(SOON_S)
        seen = [reference.header.sequence, list(reference.policy_version)]
        assert (answer := send(reference)) == seen, answer
        wait_until(lambda: ledger().delivered == FRAMES * (len(taken) + 1))
        taken.append(reference.header.sequence)
    assert not ledger().lost

    reference = collector.hand_over(SOON_S, keep_s=0.1)
    wait_until(lambda: ledger().lost.get("not_taken") == FRAMES)
    assert "0: worker 0: its rollout" in (answer := send(reference)), answer
    assert "not taken within 0.1 s" in answer, answer

    reference = collector.hand_over(SOON_S)
    [process] = collector._backend.workers._lifecycle.processes.values()
    os.kill(process.connection.hello.pid, signal.SIGKILL)
    wait_until(lambda: ledger().lost.get("worker_lost", 0) >= FRAMES)
    assert "0: worker 0: its rollout" in (answer := send(reference)), answer
    assert "process has ended" in answer, answer

    reference = collector.hand_over(SOON_S)  # of the worker that replaced it
    assert (answer := send(reference)) == [0, list(reference.policy_version)], answer
    wait_until(lambda: ledger().delivered == FRAMES * 4)
    assert not received, "tensors came to the trainer that only handed them over"
    dist.send_object_list([None], dst=1)
    return ledger().delivered


def take_over(collector):
    """Take all rollouts that the first trainer offers; return the number of frames."""
    transport = collector._backend.workers.transport
    taken = 0
    while True:
        message = [None]
        dist.recv_object_list(message, src=0)
        [reference] = message
        if reference is None:
            return taken
        if taken == 0:
            # As if it were on another host.
            assert reference.contact.memory_sample is not None
            contact = replace(reference.contact, memory_sample=None)
            reference = replace(reference, contact=contact)
        elif taken == FRAMES:
            transport.disconnect(reference.peer)
        try:
            batch = collector.take_over(reference, SOON_S)
        except dc.RolloutGone as error:
            dist.send_object_list([f"{error.worker_id}: {error}"], dst=0)
            continue
        assert transport.shares_memory(reference.peer) == (taken > 0)
        assert received.pop() == reference.num_bytes
        assert not received
        assert batch.shape == (1, FRAMES)
        first = reference.header.sequence * FRAMES
        assert batch["observation"][0, :, -1].tolist() == list(range(first, first + FRAMES))
        trajectory = batch["collector", "traj_ids"]
        assert (trajectory // TRAJ_IDS_PER_PEER % 2 == 0).all()
        versions = batch["collector", "policy_version"]
        taken += FRAMES
        seen = [reference.header.sequence, [versions.min().item(), versions.max().item()]]
        dist.send_object_list([seen], dst=0)


def main():
    dist.init_process_group("gloo")
    count_received()
    policy = Policy()
    with dc.RPCDataCollector(Counting, policy, frames_per_batch=FRAMES) as collector:
        rank = dist.get_rank()
        count = hand_over(collector) if rank == 0 else take_over(collector)
        batch = collector.next(SOON_S)  # its own workers are not affected
        assert (batch["collector", "traj_ids"] // TRAJ_IDS_PER_PEER % 2 == rank).all()
        everything = [None, None]
        dist.all_gather_object(everything, count)
    if rank == 0:
        handed_over, taken = everything
        print(json.dumps({"handed_over": handed_over, "taken": taken}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    dc.run(main, num_trainers=2)
