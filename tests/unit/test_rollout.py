"""Slabs, and the batches that are assembled from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Layout, TorchRLKeys
from distcollect.rollout.pickled_rollout import packed, unpacked
from distcollect.rollout.slab import Slab
from distcollect.rollout.slabs import new_slab
from distcollect.rollout.spaces import Leaf

N, T = 2, 4
# Small leaves are sent together, large ones alone.
STATE = (
    Leaf(("pixels",), (3,), torch.uint8),
    Leaf(("big",), (200, 200), torch.uint8),
    Leaf(("deep", "x"), (), torch.float64),
)
LAYOUT = Layout(
    (N,), STATE, (Leaf(("action",), (), torch.int64),), (Leaf(("h",), (3,), torch.float32),)
)
X = ("deep", "x")


def filled(finals: Any = (), *, first: int = 0, layout: Layout = LAYOUT, steps: int = T) -> Slab:
    """A slab of different numbers; ``finals`` has (row, step) where episodes end."""
    slab = Slab(layout, steps)
    for array in (*slab.frames.values(), *slab.tail.values()):
        if array.dtype != bool:
            array[...] = np.arange(first, first + array.size).reshape(array.shape)
            first += array.size
    for row, step in finals:
        slab.terminated[row, step] = step % 2 == 0
        slab.truncated[row, step] = row % 2 == 0 or step % 2 == 1
        final = {key: end_of(slab, key, step)[row : row + 1] for key in slab.tail}
        slab.add_finals(np.array([row]), step, final)
    return slab


def end_of(slab: Slab, key: tuple[str, ...], step: int) -> np.ndarray:
    """The final observations of episodes that end at ``step``; no slab has these values."""
    tail = slab.tail[key]
    return (tail.astype(np.int64) + 10_000 + 10 * step).astype(tail.dtype)


def rollout(slab: Slab, worker_id: int = 0) -> Rollout:
    return Rollout(
        Header(worker_id, 0, 0, slab.num_frames, slab.num_steps, 0, (0, 0)), slab.tensors()
    )


def expected_next(slab: Slab, finals: Any, key: tuple[str, ...]) -> np.ndarray:
    following = np.concatenate([slab.frames[key][:, 1:], slab.tail[key][:, None]], 1)
    for row, step in finals:
        following[row, step] = end_of(slab, key, step)[row]
    return following


FINALS = [
    [],
    [(0, 0)],
    [(1, T - 1)],
    [(0, T - 1), (1, 0), (1, 1)],
    [(row, step) for step in range(T) for row in range(N)],
]


@pytest.mark.parametrize("finals", FINALS)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_assemble(num_workers: int, finals: list[tuple[int, int]]) -> None:
    """Check each value; episodes end at different steps in each worker."""
    ids = list(range(num_workers))[::-1]
    ends = [finals if index % 2 == 0 else [(0, 1)] for index in range(num_workers)]
    slabs = [filled(end, first=2000 * i) for i, end in enumerate(ends)]
    batch = assemble(LAYOUT, [rollout(s, i) for s, i in zip(slabs, ids, strict=True)])
    assert batch.shape == (num_workers * N, T)
    for node in (batch, batch["next"], batch["deep"], batch["next", "deep"], batch["collector"]):
        assert (node.batch_size, node.names) == (batch.shape, [None, "time"])
    for key in (X, ("pixels",), ("big",)):
        root = np.concatenate([slab.frames[key] for slab in slabs])
        after = np.concatenate(
            [expected_next(slab, end, key) for slab, end in zip(slabs, ends, strict=True)]
        )
        assert (batch[key].numpy() == root).all()
        assert (batch[("next", *key)].numpy() == after).all()
    for name, where in {
        "h": "h",
        "action": "action",
        "traj_ids": ("collector", "traj_ids"),
        "policy_version": ("collector", "policy_version"),
    }.items():
        key = where if isinstance(where, tuple) else (name,)
        assert (batch[where].numpy() == np.concatenate([s.frames[key] for s in slabs])).all()
    for name in ("reward", "terminated", "truncated"):
        given = np.concatenate([slab.frames[name,] for slab in slabs])[..., None]
        assert (batch["next", name].numpy() == given).all()
    ended = batch["next", "terminated"] | batch["next", "truncated"]
    assert torch.equal(batch["next", "done"], ended)
    assert ended.sum() == sum(map(len, ends))
    rows = batch["collector", "worker_id"]
    assert rows.tolist() == [[i] * T for i in ids for _ in range(N)]
    assert rows.dtype == torch.int64


SMALL = Layout((N,), (STATE[0], STATE[2], Leaf(("none",), (0,), torch.float32)), (), ())
MEDIUM = Layout((N,), (Leaf(("image",), (100, 100), torch.uint8), STATE[2]), (), ())


@pytest.mark.parametrize("layout", [SMALL, MEDIUM, LAYOUT], ids=["small", "medium", "large"])
def test_rollouts_that_travelled_in_different_forms(layout: Layout) -> None:
    """Together they give the batches that each gives alone, one after the other."""
    rollouts = []
    for index, shared in enumerate([False, True, True, False, False]):
        slab = Slab(layout, T, shared=shared)
        like = filled(FINALS[index], first=2000 * index, layout=layout)
        for mine, theirs in ((slab.frames, like.frames), (slab.tail, like.tail)):
            for key, array in mine.items():
                array[:] = theirs[key]
        for row, step in FINALS[index]:
            final = {key: end_of(slab, key, step)[row : row + 1] for key in slab.tail}
            slab.add_finals(np.array([row]), step, final)
        header = Header(index, 0, 0, N * T, T, 0, (0, 0), wire_form=slab.wire_form)
        # A trainer on the same host maps what is shared: here this process has that memory itself.
        rollouts.append(Rollout(header, slab.tensors(mapped=False)))
    batch = assemble(layout, rollouts, shape=(5, N, T))
    alone = torch.stack([assemble(layout, [each]) for each in rollouts])
    assert batch.shape == (5, N, T)
    assert batch.names == [None, None, "time"]
    for key, value in alone.items(include_nested=True, leaves_only=True):
        assert torch.equal(batch[key], value), key


def test_no_leaf_is_packed_and_one_has_no_elements() -> None:
    layout = Layout((1,), (Leaf(("none",), (0,), torch.float32),), (), ())
    steps = 1 << 18
    slabs = [filled(layout=layout, steps=steps, first=k) for k in range(2)]
    batch = assemble(layout, [rollout(slab) for slab in slabs])
    assert slabs[0].tensors()[0].numel() == 0
    assert batch["none"].shape == batch["next", "none"].shape == (2, steps, 0)
    assert batch["next", "reward"][:, 0, 0].tolist() == [0, 1]


def test_many_frames_without_a_fixed_shape() -> None:
    """So many that their bookkeeping is not packed."""
    rows = 1 << 14
    keys = TorchRLKeys((("reward",),), (("done",),), (("done",),))
    layout = Layout((rows,), torchrl_keys=keys, is_loose=True)
    slab: Any = new_slab(layout, 2)
    frame = TensorDict({"next": {"reward": torch.ones(rows, 1)}}, batch_size=[rows])
    slab.write(0, [frame, frame], set())
    slab.traj_ids.fill(7)
    batch = assemble(layout, [rollout(slab)])
    assert (batch["collector", "traj_ids"] == 7).all()
    assert batch.shape == (1, rows, 2)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_memory(num_workers: int) -> None:
    """No two entries share memory; large tensors of a single rollout are not copied."""
    slabs = [filled([(0, 1)]) for _ in range(num_workers)]
    rollouts = [rollout(slab) for slab in slabs]
    batch = assemble(LAYOUT, rollouts)
    leaves = list(batch.values(include_nested=True, leaves_only=True))
    mine = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    assert len(mine) == len(leaves)
    assert not any(leaf.is_inference() or leaf.requires_grad for leaf in leaves)
    theirs = {tensor.untyped_storage().data_ptr() for r in rollouts for tensor in r.tensors}
    taken = batch["big"].untyped_storage().data_ptr()
    assert mine & theirs == ({taken} if num_workers == 1 else set())
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in leaves)
    if num_workers > 1:
        before = batch.clone()
        for slab in slabs:
            for array in slab.frames.values():
                array.fill(1)
        assert (batch == before).all()


def test_frames_without_a_fixed_shape_travel_on_the_cpu() -> None:
    frames = TensorDict({"a": torch.ones(2), "b": {"c": "text"}}, batch_size=[])
    found = unpacked([packed(frames)])
    assert found.device is None
    assert (found["a"] == 1).all()
    assert found["b", "c"] == "text"
    # Nothing can be copied from this device; that shows that they are to be copied.
    with pytest.raises(NotImplementedError, match="meta"):
        packed(TensorDict({"a": torch.ones(2, device="meta")}, batch_size=[]))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_batch_elsewhere_has_the_same_entries(num_workers: int) -> None:
    rollouts = [rollout(filled([(0, 1)]), k) for k in range(num_workers)]
    here = assemble(LAYOUT, rollouts)
    there = assemble(LAYOUT, rollouts, device=torch.device("meta"))
    assert there.device == torch.device("meta")
    assert (there.batch_size, there.names) == (here.batch_size, here.names)
    mine, theirs = (dict(batch.items(include_nested=True)) for batch in (here, there))
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert (value.shape, value.dtype) == (theirs[key].shape, theirs[key].dtype)


@pytest.mark.parametrize("finals", FINALS)
def test_what_travels(finals: list[tuple[int, int]]) -> None:
    """Two tensors, little larger than the frames; each observation is sent once."""
    slab = filled(finals)
    packed, big = slab.tensors()
    assert big.untyped_storage().nbytes() == big.nbytes == N * T * 200 * 200
    ends = sum(array[0].nbytes for array in slab.tail.values()) * len(finals)
    arrays = (*slab.frames.values(), *slab.tail.values())
    small = sum(array.nbytes for array in arrays) - big.nbytes + ends + 8 * len(finals)
    assert small <= packed.nbytes < small + 16 * (len(arrays) + 4)
