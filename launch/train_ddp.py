"""PPO learns CartPole-v1 with two trainers, which have workers of their own.

    torchrun --standalone --nproc-per-node=4 launch/train_ddp.py  # two trainers, a worker for each

Ranks 0 and 1 run main(), the others are workers, dealt out to the two. A trainer learns from what
its own workers collect; DDP averages the gradients, so that after each step both have the same
policy, which each of them sends to its own workers. Rank 0 reports on the episodes of all workers.
All else, and what is in the --out folder, is as in train_ppo.py.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from train_ppo import (
    ENV,
    LEARNING_RATE,
    ActorCritic,
    Episodes,
    Losses,
    figures,
    finish,
    learn,
    parser,
)

import distcollect as dc

TRAINERS = 2


def of_all_trainers(own: TensorDict) -> TensorDict:
    """The rows of all trainers' batches, in the order of their ranks."""
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    rows: TensorDict = torch.cat(everyone)
    return rows


def main() -> None:
    """Train; runs on the trainers, each of which sees its rank among them."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the trainers share the cores with the workers
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = ActorCritic()
    losses = DistributedDataParallel(Losses(model))  # all that has gradients, in one call
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, eps=1e-5)
    num_batches = max(1, args.total_frames // args.frames_per_batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_batches)
    episodes, solved = Episodes(), False

    num_workers = torch.tensor(args.num_workers)
    dist.all_reduce(num_workers)  # of all trainers
    share = args.frames_per_batch * args.num_workers // int(num_workers)
    collector = dc.RPCDataCollector(
        ENV,
        model,
        frames_per_batch=share,
        total_frames=num_batches * share,
        num_workers=args.num_workers,
        envs_per_worker=args.envs_per_worker,
        sync=True,
    )
    bar = tqdm(total=args.total_frames, unit=" frames", unit_scale=True, disable=rank > 0)
    start = time.monotonic()
    path = args.out / "metrics.jsonl" if rank == 0 else Path(os.devnull)
    with collector, bar, path.open("w", buffering=1) as metrics:
        collector.set_seed(TRAINERS * args.seed + rank)  # with the same they would see the same
        for batch in collector:
            episodes.add(of_all_trainers(batch.select(("next", "reward"), ("next", "done"))))
            versions = batch["collector", "policy_version"]
            lag = collector.policy_version - versions.double().mean().item()  # 0: on-policy
            means = learn(model, losses, optimizer, batch)
            schedule.step()
            collector.update_policy_weights_(model)

            row = figures(episodes, time.monotonic() - start, lag, means)
            metrics.write(json.dumps(row) + "\n")
            bar.set_postfix({"return": episodes.average or 0.0, "policy lag": lag}, refresh=False)
            bar.update(episodes.frames - bar.n)
            # The trainers know of the same episodes, so they stop together.
            solved = solved or episodes.reached(args.solved_at)
            if solved and not args.keep_going:
                break

    # Else torch may end the group, with the interpreter locked, while a thread of that group still
    # needs it to give the last gathered tensors back.
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        title = f"PPO on {ENV} with {TRAINERS} trainers"
        finish(args, title, model, episodes, time.monotonic() - start, solved=solved)


def parse_args() -> argparse.Namespace:
    """The command line."""
    command = parser(__doc__)
    command.set_defaults(out=Path("runs/ddp_cartpole"))
    return command.parse_args()


if __name__ == "__main__":
    parse_args()  # --help needs no launcher
    dc.run(main, num_trainers=TRAINERS)
