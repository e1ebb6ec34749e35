"""Warns of training that no worker sees: weights that were changed in place, never published."""

from __future__ import annotations

import warnings

from torch import nn

from distcollect.collectors.stacklevel import users_stack_level
from distcollect.policy.weight_layout import WeightLayout, state_tensors

# A buffer is filled in the background at its own pace, so the loop may well publish later.
PATIENCE_IN_BACKGROUND = 20


class UnpublishedChanges:
    """Notices changes of the weights, until some are published for the first time.

    Changes are seen by the version counters of tensors, so not those by ``tensor.data``.

    Attributes:
        patience: number of batches that may be delivered with changed weights before it warns.
    """

    def __init__(
        self, module: nn.Module | None, layout: WeightLayout, *, patience: int = 1
    ) -> None:
        """Watch the weights of ``module`` that ``layout`` has."""
        self.patience = patience
        state = state_tensors(module)
        names = [entry.names[0] for entry in layout.entries]
        self._tensors = [state[name] for name in names if name in state]
        self._before = self._versions()
        self._num_batches = 0

    def batch_begins(self) -> None:
        """Warn, once, if more batches than :attr:`patience` were delivered with changed weights."""
        if self._versions() == self._before:
            return
        self._num_batches += 1
        if self._num_batches <= self.patience:
            return
        self._tensors, self._before = [], []  # it warns once
        warnings.warn(
            "the policy's weights were changed, but its copies collect with those that they had "
            "at the start: call collector.update_policy_weights_() after you have changed "
            "them, or pass update_at_each_batch=True",
            UserWarning,
            stacklevel=users_stack_level(),
        )

    def _versions(self) -> list[int]:
        return [t._version for t in self._tensors if not t.is_inference()]  # noqa: SLF001 - torch's
