"""Trains with a Checkpoint, each time in a new process, as told by lines of JSON on stdin.

Each line is a session; see ``Session`` in helpers/judge_checkpoints.py. It answers each by a line
once the session's process has ended, however that was. What a session does it writes to a journal,
before and after. It knows the public API and the documentation only.
"""

# ruff: noqa: NPY002 - the random numbers that a checkpoint saves

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import gymnasium as gym
import numpy as np
import torch
from helpers.interrupting import LineTracer
from helpers.loopback_pool import loopback_collector

import distcollect as dc

EVERY_S = 600.0
monotonic, passed_s = time.monotonic, [0.0]
time.monotonic = lambda: monotonic() + passed_s[0]


class Echo(gym.Env):
    """One step long; its return is the action."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,))
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,))

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action[0]), True, False, {}


class Constant(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        return self.value.expand(len(observation), 1)


def drawn():
    """The next random numbers, which stay the next ones."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    numbers = [torch.rand(1).item(), np.random.random(), random.random()]
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
    return numbers


class Run:
    """What is trained, and its checkpoint."""

    def __init__(self, given):
        torch.manual_seed(given["number"])
        random.seed(given["number"])
        np.random.seed(given["number"])
        self.policy = Constant()
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.0, momentum=0.5)
        self.progress = {"updates": 0, "sum": torch.zeros(2)}
        make, more = dc.SyncDataCollector, {}
        if given["has_workers"]:
            make, more = loopback_collector, {"num_workers": 1, "sync": True}
        self.collector = make(
            Echo, self.policy, frames_per_batch=4, total_frames=given["total_frames"], **more
        )
        self.checkpoint = dc.Checkpoint(
            Path(given["folder"]) / "c.pt",
            every_s=EVERY_S,
            keep_last=given["keep_last"],
            best="return",
            policy=self.policy,
            optimizer=self.optimizer,
            progress=self.progress,
            collector=self.collector,
        )

    def state(self):
        """All that is saved."""
        momentum = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        return {
            "value": self.policy.value.item(),
            "momentum": sum(each.item() for each in momentum),
            "updates": self.progress["updates"],
            "sum": self.progress["sum"].tolist(),
            "frames": self.collector.frames,
            "drawn": drawn(),
        }

    def about(self):
        episodes = self.collector.stats().episodes
        return {
            "state": self.state(),
            "version": self.collector.policy_version,
            "episodes": [episodes.count, episodes.mean_return],
        }

    def next(self):
        try:
            batch = self.collector.next(timeout_s=60)
        except StopIteration:
            return None
        about = batch["collector"]
        return {
            "ids": about["traj_ids"].flatten().tolist(),
            "versions": about["policy_version"].unique().tolist(),
            "values": batch["action"].unique().tolist(),
        }

    def learn(self, value):
        torch.rand(1), np.random.random(), random.random()
        self.policy.value.grad = torch.full((1,), float(value))
        self.optimizer.step()
        with torch.no_grad():
            self.policy.value.fill_(value)
        self.progress["updates"] += 1
        self.progress["sum"] += value

    def publish(self):
        self.collector.update_policy_weights_(self.policy)

    def evaluate(self):
        return self.collector.evaluate(2, timeout_s=60).returns.tolist()

    def step(self):
        return self.checkpoint.step()

    def save(self):
        self.checkpoint.save()

    def time_passes(self):
        passed_s[0] += EVERY_S

    def is_told_to_end(self):
        signal.raise_signal(signal.SIGTERM)
        self.checkpoint.step()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def session(given):
    """A session, in a process of its own."""
    run = Run(given)
    with Path(given["journal"]).open("a", buffering=1) as journal:

        def note(**what):
            journal.write(json.dumps(what) + "\n")

        note(loaded=run.checkpoint.load(), **run.about())
        for index, (name, *args) in enumerate(given["script"]):
            note(does=name, args=args, **run.about())
            method, line = getattr(run, name), given["killed_at"].get(str(index))
            if line is None:
                result = method(*args)
            else:
                with LineTracer(line, kill).tracing():
                    method(*args)
                kill()
            note(did=name, result=result, **run.about())
    run.collector.shutdown()


def look(given):
    """What the files hold, as a new run would load it."""
    found = {}
    for path in Path(given["folder"]).glob("c*.pt"):
        run = Run(given)
        assert run.checkpoint.load(path)
        found[path.name] = run.state()
        run.collector.shutdown()
    Path(given["journal"]).write_text(json.dumps(found))


def main():
    # What each process would import by itself.
    torch.optim.SGD(Constant().parameters(), lr=0.0)
    _ = dc.SyncDataCollector, dc.Checkpoint
    for line in sys.stdin:
        given = json.loads(line)
        if not (pid := os.fork()):
            code = 1
            try:
                session(given) if given["script"] else look(given)
                code = 0
            except SystemExit as error:
                code = error.code
            finally:
                sys.excepthook(*sys.exc_info()) if code == 1 else None
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), flush=True)


if __name__ == "__main__":
    main()
