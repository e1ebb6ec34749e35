"""A worker's plan as it travels: the tensors of its policy in a part of their own.

Plans whose env makers differ have this part in common, so it is pickled, kept and sent once.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from distcollect.common.by_value import Pickler, dumps
from distcollect.engine.plan import WorkerPlan
from distcollect.policy.weight_layout import module_of

# The pickled tensors and the pickled plan, which refers to them by their indices.
PickledPlan: TypeAlias = Sequence[bytes]


class TensorTable:
    """Tensors that are pickled once for several plans."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Pickle ``tensors``, as tensors on the CPU; one that occurs twice is pickled once."""
        by_id = {id(tensor): tensor for tensor in tensors}
        self._tensors = list(by_id.values())  # also keeps the ids valid
        self._index_of = {each: index for index, each in enumerate(by_id)}
        # A host without this host's GPU is to unpickle them.
        self._pickled = dumps([_on_cpu(tensor) for tensor in self._tensors])

    def pickled(self, plan: WorkerPlan) -> PickledPlan:
        """``plan``, which refers to the table where it has one of its tensors.

        An error that one of its objects raises is passed on.
        """
        file = io.BytesIO()
        PicklerWithout(file, lambda value: self._index_of.get(id(value))).dump(plan)
        return self._pickled, file.getvalue()


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu:
        return tensor
    value = tensor.detach().cpu()
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


class PicklerWithout(Pickler):
    """Leaves objects out for which a function gives a number."""

    def __init__(self, file: io.BytesIO, number_of: Callable[[object], int | None]) -> None:
        super().__init__(file)
        self._number_of = number_of

    def persistent_id(self, obj: object) -> int | None:
        """See :meth:`pickle.Pickler.persistent_id`."""
        return self._number_of(obj)


class UnpicklerWith(pickle.Unpickler):
    """Puts objects in the places of those that were left out, by their numbers."""

    def __init__(self, file: io.BytesIO, objects: Sequence[object]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: int) -> object:
        """See :meth:`pickle.Unpickler.persistent_load`."""
        return self._objects[pid]


def unpickled(parts: Sequence[bytes | mmap.mmap]) -> WorkerPlan:
    """The plan, from the parts that :meth:`TensorTable.pickled` returned.

    An error that one of its objects raises is passed on.
    """
    tensors, plan = parts
    unpickler = UnpicklerWith(io.BytesIO(plan), pickle.loads(tensors))
    loaded: WorkerPlan = unpickler.load()
    take_state(loaded.policy, loaded.held)
    return loaded


def take_state(policy: Any, held: nn.Module | None) -> None:
    """Have a policy that came to this process compute with the state of the module that it held.

    A function that travels by its name uses the modules of the process that it comes to: they get
    the weights of ``held``, all of its buffers, and its mode. From then on both are one, as modules
    that an env maker or ``models`` brought here may be parts of ``held``.
    """
    target = module_of(policy)
    if held is None or target is None or target is held:
        return
    target.load_state_dict(held.state_dict())
    buffers = dict(held.named_buffers())  # the state has no buffers that aren't persistent
    for name, buffer in target.named_buffers():
        if name in buffers:
            buffer.data = buffers[name].to(buffer)
    parts = dict(held.named_modules())
    for name, part in target.named_modules():
        if name in parts:
            part.training = parts[name].training
            parts[name].__dict__ = part.__dict__
