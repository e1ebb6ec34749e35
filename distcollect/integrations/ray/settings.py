"""What to ask Ray for. Nothing here needs Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distcollect.common.tables import counted
from distcollect.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from distcollect.integrations.ray.placer import RayPlacer

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
# Options of an actor that are set here, and why.
_OWN_OPTIONS = {
    "name": "the actors are named after the workers",
    "lifetime": "the actors end with the trainer",
    "max_concurrency": "an actor does one thing",
    "max_task_retries": "a worker is started again wherever Ray restarts its actor",
}
_PLACED = ("scheduling_strategy", "placement_group")
# Ray's names of an actor's options, and of the resources that they mean.
_RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


@dataclass(frozen=True)
class RaySettings:
    """How to connect to Ray, and what to ask for.

    Attributes:
        init_config: the arguments of ``ray.init``.
        worker_options: the options of all actors, or of each one in the order of worker_id.
        strategy: of a placement group for all actors, see Ray's documentation; None: each actor is
            placed by itself.
    """

    init_config: Mapping[str, Any] = field(default_factory=dict)
    worker_options: Mapping[str, Any] | Sequence[Mapping[str, Any]] = field(default_factory=dict)
    strategy: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.init_config, Mapping):
            raise ArgumentTypeError(
                f"ray_init_config={self.init_config!r}: must be a dict of arguments of ray.init"
            )
        if self.strategy not in (None, *STRATEGIES):
            raise ArgumentError(
                f"placement_group_strategy={self.strategy!r}: use one of "
                f"{', '.join(map(repr, STRATEGIES))}, or None"
            )
        for options in self.all_options:
            self._check(options)

    @property
    def all_options(self) -> Sequence[Mapping[str, Any]]:
        """The options of all actors, or of each."""
        options = self.worker_options
        return options if isinstance(options, list | tuple) else [options]  # type: ignore[list-item]

    def _check(self, options: object) -> None:
        if not isinstance(options, Mapping):
            raise ArgumentTypeError(
                f"remote_configs={self.worker_options!r}: must be a dict of options of ray.remote, "
                "or a list with one for each worker"
            )
        for name in options:
            if name in _OWN_OPTIONS:
                raise ArgumentError(f"remote_configs: {name!r} can't be set: {_OWN_OPTIONS[name]}")
            if self.strategy is not None and name in _PLACED and options[name] is not None:
                raise ArgumentError(
                    f"remote_configs: {name!r} and placement_group_strategy={self.strategy!r} "
                    "contradict each other: give one of them"
                )

    def connect(self) -> RayPlacer:
        """Connect to Ray.

        Raises:
            ArgumentError: Ray has no such options of actors.
            LaunchError: Ray is not installed, or can't be reached.
        """
        from distcollect.integrations.ray.placer import RayPlacer  # noqa: PLC0415 - it needs this

        return RayPlacer(self)

    def check_count(self, num_workers: int) -> None:
        """Raise ArgumentError if there are options for another number of workers."""
        if (
            isinstance(self.worker_options, list | tuple)
            and len(self.worker_options) != num_workers
        ):
            raise ArgumentError(
                f"remote_configs has {counted(len(self.worker_options), 'dict')} for "
                f"{counted(num_workers, 'worker')}: a list has one for each worker"
            )

    def options(self, worker_id: int) -> dict[str, Any]:
        """The options of a worker's actor, with our defaults."""
        options = self.all_options
        own = options[worker_id if len(options) > 1 else 0]
        return {"num_cpus": 1, "max_restarts": -1, **own}

    def resources(self, worker_id: int) -> dict[str, float]:
        """Return what a worker's actor needs, by Ray's names of resources."""
        options = self.options(worker_id)
        found = {
            resource: float(options[name])
            for name, resource in _RESOURCES.items()
            if options.get(name)
        }
        found.update(options.get("resources") or {})
        if options.get("accelerator_type"):
            # As Ray itself asks for it.
            found[f"accelerator_type:{options['accelerator_type']}"] = 0.001
        return found
