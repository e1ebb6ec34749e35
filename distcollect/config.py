"""What is ours among a collector's settings, validated once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .errors import ArgumentError


@dataclass(frozen=True)
class WeightSync:
    """How new weights get to the workers.

    Attributes:
        backend: "gloo"; "nccl"; or "auto": NCCL where trainer and selected workers have their
            policies on a GPU each, else Gloo (from and to GPUs through pinned memory).
    """

    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "gloo", "nccl"):
            raise ArgumentError(
                f"WeightSync(backend={self.backend!r}): use 'auto', 'gloo' or 'nccl'"
            )


@dataclass(frozen=True)
class Faults:
    """How long to wait for whom before it counts as a failure. All in seconds.

    Attributes:
        start_timeout_s: for all workers to start and join, and for each to try out its envs.
        batch_timeout_s: for a batch, while someone waits for it.
        weights_timeout_s: for each of the three steps of a weight push.
        stop_timeout_s: for workers to end by themselves at shutdown, before they are killed.
    """

    start_timeout_s: float = 180.0
    batch_timeout_s: float = 600.0
    weights_timeout_s: float = 60.0
    stop_timeout_s: float = 4.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ArgumentError(f"Faults({field.name}={value!r}): must be above 0 seconds")
