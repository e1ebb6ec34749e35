"""Makes the memory for rollouts of any layout."""

from __future__ import annotations

from typing import TypeAlias

from distcollect.rollout.pickled_rollout import PickledRollout
from distcollect.rollout.slab import Slab
from distcollect.rollout.tree_layout import AnyLayout, TreeLayout
from distcollect.rollout.tree_slab import TreeSlab

FrameSlab: TypeAlias = TreeSlab | PickledRollout  # written by the loop for TorchRL envs
AnySlab: TypeAlias = Slab | FrameSlab


def new_slab(layout: AnyLayout, num_steps: int, *, shared: bool = False) -> AnySlab:
    """Memory for one rollout ``[n, T]``.

    Args:
        layout: what a frame consists of.
        num_steps: T.
        shared: in memory that a trainer on this host can map, where the layout allows it.
    """
    if not isinstance(layout, TreeLayout):
        return Slab(layout, num_steps, shared=shared)
    if layout.is_loose:
        return PickledRollout(layout, num_steps, shared=shared)
    return TreeSlab(layout, num_steps, shared=shared)
