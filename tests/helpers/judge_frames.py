"""The oracle that compares what a collector delivers with what really happened in the envs.

It knows the documented contract only (``distcollect/docs/semantics.md``), and the files that the
rows of the envs have written (:mod:`helpers.judge_truth`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers.judge_envs import act
from helpers.judge_truth import FACTS, Episode, Step, TrueRow, read_truth
from tensordict import TensorDictBase

ENDS = ("done", "terminated", "truncated")
DTYPES = {
    "observation": torch.int64,
    "action": torch.int64,
    ("next", "observation"): torch.int64,
    ("next", "reward"): torch.float32,
    ("collector", "traj_ids"): torch.int64,
    ("collector", "policy_version"): torch.int64,
    ("collector", "worker_id"): torch.int64,
    ("collector", "faulted"): torch.bool,
    **dict.fromkeys(ENDS, torch.bool),
    **{("next", name): torch.bool for name in ENDS},
}


class Place(NamedTuple):
    """Which frame it is: the ``step`` counts from 0 within its episode."""

    uid: int
    episode: int
    step: int

    def __str__(self) -> str:
        return f"row {self.uid} episode {self.episode} step {self.step}"


@dataclass(frozen=True)
class Frame:
    """A frame as it was delivered."""

    place: Place
    seen: tuple[int, ...]
    following: tuple[int, ...]
    action: int
    reward: float
    done: bool
    terminated: bool
    truncated: bool
    faulted: bool
    traj_id: int
    worker_id: int
    where: str  # in which batch, row and column it came

    def __str__(self) -> str:
        return f"{self.where}: the frame of {self.place}"


class Wrong(AssertionError):
    """A frame, or a number, is not what really happened."""


def expect(claim: bool, what: str, *, expected: object, got: object) -> None:
    if not claim:
        raise Wrong(f"{what}\n  expected: {expected}\n  got:      {got}")


def same(what: str, expected: object, got: object) -> None:
    expect(expected == got, what, expected=expected, got=got)


@dataclass
class FrameOracle:
    """Checks the batches of one collector.

    Attributes:
        folder: of the truth.
        num_steps: T of each rollout.
        max_frames: ``max_frames_per_traj``.
        resets: ``reset_at_each_iter``.
        set_truncated: the option of this name.
        trajs: ``trajs_per_batch``.
        splits: ``split_trajs``.
        drifts: rows drift apart, and frames between two delivered ones may be missing.
        random_batches: so many batches at the start may have random actions.
        in_parallel: when one row's env raises, others may have made the step, which is lost.
        acts: whether the policy is :func:`helpers.judge_envs.act`.
    """

    folder: str
    num_steps: int
    max_frames: int | None = None
    resets: bool = False
    set_truncated: bool = False
    trajs: int | None = None
    splits: bool = False
    drifts: bool = False
    random_batches: int = 0
    in_parallel: bool = False
    acts: bool = True
    ids: dict[int, Place] = field(default_factory=dict)
    delivered: Counter[int] = field(default_factory=Counter)
    ended: list[Episode] = field(default_factory=list)
    _episode_ids: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _last: dict[int, Frame] = field(default_factory=dict)
    _open: dict[int, list[Frame]] = field(default_factory=dict)
    _batches: list[tuple[TensorDictBase, TensorDictBase]] = field(default_factory=list)
    _truth: dict[int, TrueRow] = field(default_factory=dict)

    # ------------------------------------------------------------------ batches

    def take(self, batch: TensorDictBase) -> None:
        """Compare one batch with the truth."""
        self._truth = read_truth(self.folder)
        number = len(self._batches)
        self._check_form(batch, f"batch {number}")
        names = [key for key in [*DTYPES, ("collector", "mask")] if key in batch.keys(True)]
        batch = batch.select(*names)
        self._batches.append((batch, batch.clone()))
        chunks = list(self._chunks(batch, f"batch {number}"))
        if self.trajs is not None:
            same(f"batch {number}: number of trajectories", self.trajs, len(chunks))
        for chunk in chunks:
            self._check_chunk(chunk)

    def _check_form(self, batch: TensorDictBase, where: str) -> None:
        for key, dtype in DTYPES.items():
            same(f"{where}: dtype of {key}", dtype, batch[key].dtype)
        same(f"{where}: the last dimension", "time", batch.names[-1])
        for name in ENDS:
            expect(not batch[name].any(), f"{where}: {name} at the root", expected=0, got=1)
            same(f"{where}: shape of {name}", (*batch.shape, 1), tuple(batch["next", name].shape))
        may_pad = self.trajs is not None or self.splits
        if may_pad:
            expect(("collector", "mask") in batch.keys(True), where, expected="a mask", got="none")

    def _chunks(self, batch: TensorDictBase, where: str) -> Iterator[list[Frame]]:
        """Frames that follow each other: the rows of rollouts, or trajectories; no padding."""
        by_trajectory = self.trajs is not None or self.splits
        width = batch.shape[-1] if by_trajectory else self.num_steps
        expect(batch.numel() % width == 0, where, expected=f"rows of {width}", got=batch.shape)
        flat = batch.reshape(-1)
        count = flat.shape[0]
        leaves = {key: flat[key].reshape(count, -1).numpy() for key in DTYPES}
        if ("collector", "mask") in flat.keys(True):
            mask = flat["collector", "mask"].numpy()
        else:
            mask = np.ones(count, bool)
        for start in range(0, count, width):
            chunk = []
            for i in range(start, start + width):
                here = f"{where} row {start // width} column {i - start}"
                if mask[i]:
                    frame = _frame(leaves, i, here)
                    same(f"{here}: padding before a frame", i - start, len(chunk))
                    chunk.append(frame)
                else:
                    same(f"{here}: traj_id of padding", -1, leaves["collector", "traj_ids"][i, 0])
            if chunk:
                yield chunk

    def _check_chunk(self, chunk: list[Frame]) -> None:
        for column, frame in enumerate(chunk):
            self._check_frame(frame, is_last=column == len(chunk) - 1)
            before = chunk[column - 1] if column else None
            if before is not None:
                self._check_following(before, frame)
            else:
                self._check_continued(frame)
            self._note(frame)
        if self.trajs is not None or self.splits:
            ids = {frame.traj_id for frame in chunk}
            same(f"{chunk[0]}: number of trajectories in its row", 1, len(ids))
        if self.trajs is not None:
            same(f"{chunk[0]}, the first of a whole trajectory: its step", 0, chunk[0].place.step)
            same(f"{chunk[-1]}, the last of a whole trajectory: done", True, chunk[-1].done)
        if self.resets and self.trajs is None and not self.splits:
            same(f"{chunk[0]}, the first after a reset: its step", 0, chunk[0].place.step)

    # ------------------------------------------------------------------ frames

    def _check_frame(self, frame: Frame, *, is_last: bool) -> None:
        """Compare one frame with what happened in the env."""
        uid, episode, step = place = frame.place
        row = self._truth.get(uid)
        true = None if row is None else row.steps.get((episode, step))
        if row is None or true is None:
            raise Wrong(f"{frame}: the env never made such a step\n  got: {frame!r}")
        expect(not row.evaluates, f"{frame}", expected="a frame", got="one of an evaluation")
        same(f"{frame}: action", true.action, frame.action)
        same(f"{frame}: next observation", (uid, episode, step + 1, true.action), frame.following)
        same(f"{frame}: reward", true.reward, frame.reward)
        same(f"{frame}: terminated", true.terminated, frame.terminated)
        cut = self._cut(row, true, frame, is_last=is_last)
        if cut is not None:
            expected = true.truncated or cut
            expect(frame.truncated == expected, f"{frame}: truncated", expected=expected, got=place)
        same(f"{frame}: done", frame.terminated or frame.truncated, frame.done)
        same(f"{frame}: worker_id", row.worker_id, frame.worker_id)
        if self.acts and len(self._batches) > self.random_batches:
            chosen = int(act(torch.tensor([frame.seen]))[0])
            same(f"{frame}: action of the policy for what it saw", chosen, frame.action)

    def _cut(self, row: TrueRow, true: Step, frame: Frame, *, is_last: bool) -> bool | None:
        """Whether the collector must truncate here; None: it may or may not."""
        _, episode, step = frame.place
        if frame.faulted:
            broke = [fault for each in self._siblings(row) for fault in each.faults]
            expect(bool(broke), f"{frame}: faulted", expected="an env that raised", got="none did")
            goes_on = (episode, step + 1 + self.in_parallel) in row.steps
            expect(not goes_on, f"{frame}: faulted", expected="the last frame", got="it went on")
            return True
        if step + 1 == self.max_frames:
            return None if true.terminated else True
        if self.set_truncated and not true.terminated:
            # Trajectories don't show where their rollouts ended.
            return None if self.trajs is not None or self.splits else is_last
        return False

    def _siblings(self, row: TrueRow) -> list[TrueRow]:
        """The rows of its worker: those of a vector env are recreated together."""
        return [each for each in self._truth.values() if each.worker_id == row.worker_id]

    def _check_following(self, before: Frame, frame: Frame) -> None:
        """Within a row, frame t + 1 follows frame t."""
        what = f"{frame}, after that of {before.place}"
        a, b = before.place, frame.place
        if before.done:
            expect(frame.traj_id != before.traj_id, f"{what}: traj_id", expected="new", got="old")
            if self._went_on(before) and not before.faulted and not self.drifts:
                # set_truncated ends a trajectory, but not the episode.
                same(what, a._replace(step=a.step + 1), b)
            elif a.uid == b.uid:
                expect(b.episode > a.episode, what, expected="a later episode", got=b)
                expect(b.step == 0 or self.drifts, what, expected="an episode's start", got=b)
            else:
                expect(self._has_faults(), what, expected="the same row", got=b)
                same(f"{what}: step", 0, b.step)
        elif frame.traj_id == before.traj_id:
            same(what, a._replace(step=a.step + 1), b)
        else:
            expect(self.drifts, f"{what}: traj_id", expected="that of before", got="a new one")
            expect(a.uid == b.uid and a < b, what, expected="a later frame", got=b)

    def _went_on(self, frame: Frame) -> bool:
        """Whether the episode went on after this frame."""
        uid, episode, step = frame.place
        return (episode, step + 1) in self._truth[uid].steps

    def _has_faults(self) -> bool:
        return any(row.faults for row in self._truth.values())

    def _check_continued(self, frame: Frame) -> None:
        """The first frame of a row goes on where the last one of its env ended."""
        before = self._last.get(frame.place.uid)
        if before is None:
            expect(
                frame.place.step == 0 or self.drifts,
                f"{frame}, the first that was delivered of its row",
                expected="the start of an episode",
                got=frame.place,
            )
            return
        what = f"{frame}, delivered after that of {before.place}"
        expect(frame.place > before.place, what, expected="a later frame", got=frame.place)
        # Where one of several envs raised, the trajectories of others may end between two batches.
        if self.trajs is not None or self.drifts or self._has_faults():
            return
        if before.done and not self.set_truncated:
            same(f"{what}: step", 0, frame.place.step)
        elif not self.resets and not before.done:
            same(what, before.place._replace(step=before.place.step + 1), frame.place)
            same(f"{what}: traj_id", before.traj_id, frame.traj_id)

    def _note(self, frame: Frame) -> None:
        """Remember it: ids, order, and the episodes that are delivered from start to end."""
        uid, episode, step = place = frame.place
        begun = self.ids.setdefault(frame.traj_id, place)
        what = f"{frame}: what its traj_id {frame.traj_id} stood for before"
        same(what, (uid, episode), (begun.uid, begun.episode))
        ids = self._episode_ids.setdefault((uid, episode), [])
        if frame.traj_id not in ids:
            ids.append(frame.traj_id)
            may_split = self.drifts or self.set_truncated
            expect(
                len(ids) == 1 or may_split, f"{frame}: traj_ids of its episode", expected=1, got=ids
            )
        self._last[uid] = frame
        self.delivered[frame.worker_id] += 1
        parts = self._open.setdefault(uid, [])
        if parts and parts[-1].place != (uid, episode, step - 1):
            parts.clear()
        if parts or step == 0:
            parts.append(frame)
        true = self._truth[uid].steps[episode, step]
        if true.terminated or true.truncated or step + 1 == self.max_frames:
            if parts:
                self.ended.append(Episode(sum(each.reward for each in parts), len(parts)))
            parts.clear()

    # ------------------------------------------------------------------ numbers

    def check_kept(self) -> None:
        """No batch was changed after its delivery."""
        for number, (batch, clone) in enumerate(self._batches):
            equal = all(
                torch.equal(value, clone[key])
                for key, value in batch.items(True, True)
                if isinstance(value, torch.Tensor)
            )
            expect(equal, f"batch {number}", expected="as it was", got="rewritten later")

    def check_stats(self, stats: Any, *, exact: bool) -> None:
        """Compare ``stats().episodes`` with the episodes that really ended.

        Args:
            exact: whether all that ended was delivered; else more episodes may have ended.
        """
        episodes, made = stats.episodes, self._true_episodes(evaluates=False)
        low, high = len(self.ended), len(made)
        if exact:
            same("stats().episodes.count", low, episodes.count)
        else:
            fits = low <= episodes.count <= high
            expect(fits, "stats().episodes.count", expected=f"{low} to {high}", got=episodes.count)
        if not episodes.count:
            return
        returns = {episode.returned for episode in made}
        for name in ("min_return", "max_return"):
            got = getattr(episodes, name)
            expect(got in returns, f"stats().episodes.{name}", expected=sorted(returns), got=got)
        lengths = [episode.length for episode in made]
        fits = min(lengths) <= episodes.mean_length <= max(lengths)
        expect(fits, "mean_length", expected=sorted(set(lengths)), got=episodes.mean_length)
        if exact and episodes.count <= 100:
            mean = np.mean([episode.returned for episode in self.ended])
            length = np.mean([episode.length for episode in self.ended])
            close = np.allclose([mean, length], [episodes.mean_return, episodes.mean_length])
            got = (episodes.mean_return, episodes.mean_length)
            expect(close, "means of return and length", expected=(mean, length), got=got)

    def check_evaluation(self, evaluation: Any, count: int) -> None:
        """Each episode of an evaluation is a whole one that was really played, and none twice."""
        made = Counter(self._true_episodes(evaluates=True))
        returns, lengths = evaluation.returns.tolist(), evaluation.lengths.tolist()
        same("number of episodes of the evaluation", count, len(returns))
        got = Counter(Episode(*pair) for pair in zip(returns, lengths, strict=True))
        expect(got <= made, "episodes of the evaluation", expected=made, got=got - made)

    def _true_episodes(self, *, evaluates: bool) -> list[Episode]:
        """All episodes that have ended so far, by the env or by ``max_frames_per_traj``."""
        episodes = []
        for row in read_truth(self.folder).values():
            for _, steps in row.episodes() if row.evaluates == evaluates else ():
                last = steps[-1]
                if last.terminated or last.truncated or len(steps) == self.max_frames:
                    episodes.append(Episode.of(steps))
        return episodes

    def check_faults(self, stats: Any) -> None:
        """An env counts as one that raised if it did; ask before the batch is taken."""
        raised = sum(len(row.faults) for row in read_truth(self.folder).values())
        messages = [fault.message for fault in stats.env_faults]
        what = f"number of env faults; reported are {messages}"
        fits = stats.num_env_faults <= raised
        expect(fits, what, expected=f"at most {raised}", got=stats.num_env_faults)

    def check_sums(self, stats: Any) -> None:
        """Every frame that was stepped in this process was delivered once, or has a cause."""
        rows = [row for row in read_truth(self.folder).values() if not row.evaluates]
        made = sum(len(row.steps) for row in rows)
        unseen = self.in_parallel and self._num_unseen(rows)
        if self.drifts:
            # What the fast rows had made ahead when the collector was closed is listed nowhere.
            unseen += len(rows) * self.num_steps
        listed = stats.delivered + sum(stats.lost.values())
        what = f"frames delivered ({stats.delivered}) and lost ({stats.lost})"
        expect(made - unseen <= listed <= made, what, expected=made, got=listed)
        if self.trajs is None:
            same("stats().delivered", sum(self.delivered.values()), stats.delivered)

    def _num_unseen(self, rows: Sequence[TrueRow]) -> int:
        """At most so many steps were made by envs that raised before they returned them."""
        faults = sum(len(row.faults) for row in rows)
        return faults * max(row.row for row in rows)

    def check_ledger(self, ledger: Any) -> None:
        """After the end, every frame that was stepped was delivered once, or has a cause."""
        total = ledger.total
        parts = total.delivered + sum(total.lost.values()) + total.open
        same(f"stepped against delivered + lost + open in\n{ledger}", total.stepped, parts)
        same(f"open frames at the end in\n{ledger}", 0, total.open)
        if self.trajs is None:
            for worker_id, frames in ledger.workers.items():
                what = f"frames that worker {worker_id} delivered in\n{ledger}"
                same(what, self.delivered[worker_id], frames.delivered)
        rows = [row for row in read_truth(self.folder).values() if not row.evaluates]
        made = sum(len(row.steps) for row in rows)
        unseen = self.in_parallel and self._num_unseen(rows)
        fits = made - unseen <= total.stepped <= made
        what = f"frames stepped in\n{ledger}"
        expect(fits, what, expected=f"{made - unseen} to {made}", got=total.stepped)


def _frame(leaves: dict[Any, np.ndarray], i: int, where: str) -> Frame:
    seen = tuple(leaves["observation"][i].tolist())
    uid, episode, step, _ = seen
    done, terminated, truncated = (bool(leaves["next", name][i, 0]) for name in ENDS)
    return Frame(
        Place(uid, episode, step),
        seen,
        tuple(leaves["next", "observation"][i].tolist()),
        int(leaves["action"][i, 0]),
        float(leaves["next", "reward"][i, 0]),
        done,
        terminated,
        truncated,
        bool(leaves["collector", "faulted"][i, 0]),
        int(leaves["collector", "traj_ids"][i, 0]),
        int(leaves["collector", "worker_id"][i, 0]),
        where,
    )


def check_disjoint(oracles: Sequence[FrameOracle]) -> None:
    """``traj_ids`` are unique over all collectors that are open at once."""
    taken: set[int] = set()
    for number, oracle in enumerate(oracles):
        again = taken & oracle.ids.keys()
        expect(not again, f"traj_ids of collector {number}", expected="new ids", got=sorted(again))
        taken |= oracle.ids.keys()


assert len(FACTS) == 4
