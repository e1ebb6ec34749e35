"""TorchRL's profiler of rollouts, which is a hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDict
from torchrl.collectors import ProfileConfig
from torchrl.collectors._base import _ProfilerHook


class ProfilerHook(_ProfilerHook):  # type: ignore[misc]
    """A ``post_collect_hook`` that profiles what its process does from one rollout to the next.

    Attributes:
        profile_config: which workers and rollouts, and what of them.
        before: the hook in whose place it is, which it calls.
    """

    def __init__(
        self,
        before: Callable[[TensorDict], Any] | None,
        settings: Mapping[str, Any],
        *,
        has_workers: bool,
    ) -> None:
        """Profile nothing yet.

        Args:
            before: see the class.
            settings: fields of a ``ProfileConfig``; None stands for the field's default.
            has_workers: it is sent to workers, of which only some are profiled.

        Raises:
            TypeError, ValueError: TorchRL refuses the settings.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        self.profile_config = ProfileConfig(**given)
        super().__init__(self.profile_config)
        self.before = before
        self._has_workers = has_workers

    def __call__(self, batch: TensorDict) -> None:
        """Call the other hook; begin the profile, go on with it, or write it at its end."""
        if self.before is not None:
            self.before(batch)
        if self._has_workers:
            self.worker_idx = int(batch["collector", "worker_id"].flatten()[0])
        if not self._has_workers or self.profile_config.should_profile_worker(self.worker_idx):
            super().__call__(batch)

    def __del__(self) -> None:
        # A worker lets go of it when another hook is set: nothing else ends its profile.
        if hasattr(self, "_profiler"):
            self.stop()
