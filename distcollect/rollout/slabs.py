"""Makes the memory for rollouts of any layout."""

from __future__ import annotations

from typing import TypeAlias

from distcollect.rollout.layout import Layout
from distcollect.rollout.pickled_rollout import PickledRollout
from distcollect.rollout.slab import Slab
from distcollect.rollout.tree_slab import FrameSlab, TreeSlab

AnySlab: TypeAlias = Slab | FrameSlab


def new_slab(layout: Layout, num_steps: int, *, shared: bool | None = False) -> AnySlab:
    """Memory for one rollout ``[n, T]``.

    Args:
        layout: what a frame consists of.
        num_steps: T.
        shared: in memory that a trainer on this host can map, where the layout allows it; None: it
            stays in this process.
    """
    if not layout.is_torchrl:
        return Slab(layout, num_steps, shared=shared)
    kind = PickledRollout if layout.is_loose else TreeSlab
    return kind(layout, num_steps, shared=shared)
