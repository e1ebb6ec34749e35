"""The figures of a run, a row each: the display, the report, TensorBoard and Prometheus read it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from distcollect.common.checks import plain
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.results import Stats

_UNITS = "bytes", "frames", "s", "versions"
RUN, WORKER = "run", "worker"


@dataclass(frozen=True)
class Figure:
    """A figure, or several of a kind that a label tells apart.

    Attributes:
        name: in Prometheus ``distcollect_NAME``, of one worker ``distcollect_worker_NAME``.
        about: what it is.
        source: an attribute, or a function of the statistics: NaN if it is not known; with a
            label, a dict of values.
        of: what has it: a run in its :class:`~distcollect.Stats`, a worker in its
            :class:`~distcollect.WorkerStats`.
        unit: "bytes", "frames", "s", "share" or "versions"; "any": what the user measures it in; ""
            for a number of what the name says.
        rises: it only rises: a counter.
        label: what tells its values apart; "" if there is one value.
        tag: its group in TensorBoard, which has what a run has; "": it is not written from there.
        curve: whether the report has a curve of it.
        columns: headings of the display's table of workers, by the label's value.
    """

    name: str
    about: str
    source: str | Callable[[Any], Any]
    of: tuple[str, ...] = (RUN,)
    unit: str = ""
    rises: bool = False
    label: str = ""
    tag: str = "collector"
    curve: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def help(self) -> str:
        """What it is, with its unit."""
        return f"{self.about}, in {self.unit}" if self.unit in _UNITS else self.about

    def values(self, statistics: object) -> dict[str, float]:
        """The known values, and logged NaN, by the label's value; without a label, by ""."""
        read = attrgetter(self.source) if isinstance(self.source, str) else self.source
        found = read(statistics) if self.label else {"": read(statistics)}
        return {k: value for k, value in found.items() if not (self.tag and math.isnan(value))}


_NAME = re.compile(r"\w[\w./-]*", re.ASCII)


def checked_scalars(values: object) -> dict[str, float]:
    """The user's own numbers by name, as Python's.

    Raises:
        ArgumentError: a name can't be plotted.
        ArgumentTypeError: ``values`` is no dict of numbers by name.
    """
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(f"log({values!r}): give a dict, such as {{'loss': 0.1}}")
    groups = {figure.tag for figure in FIGURES if figure.tag}
    scalars = {}
    for name, given in values.items():
        value = plain(given.squeeze() if hasattr(given, "squeeze") else given)
        what = f"log({{{name!r}: ...}})"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ArgumentError(
                f"{what}: a name has letters, digits and _ . / - only, and begins with none of the "
                "last three"
            )
        if (group := name.partition("/")[0]) in groups and group != name:
            raise ArgumentError(
                f"{what}: {group}/ is for the collector's own figures: give it another name"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(
                f"{what}: {given!r} is no number: pass a float or one element, as loss.mean() is"
            )
        try:
            float(value)
        except OverflowError:
            raise ArgumentError(f"{what}: has too many digits for a float") from None
        scalars[name] = value
    return scalars


def _num_ready(stats: Stats) -> float:
    # At the end all workers have left: that is no loss.
    return math.nan if stats.ended else sum(w.state == "ready" for w in stats.workers.values())


_BOTH = RUN, WORKER
_HUNDRED = "of the last hundred episodes"
_NEWEST = "of the newest evaluation"

FIGURES = (
    Figure("frames_per_s", "Recent frames per second", "frames_per_s", _BOTH, curve=True,
           columns={"": "frames/s"}),
    Figure("frames", "Frames delivered", "frames", _BOTH, rises=True),
    Figure("policy_version", "How often weights were published", "policy_version", rises=True),
    Figure("episodes", "Episodes that have ended", "episodes.count", rises=True),
    Figure("episode_return", f"Mean return {_HUNDRED}", "episodes.mean_return", unit="any",
           curve=True),
    Figure("episode_length", f"Mean length {_HUNDRED}", "episodes.mean_length", unit="frames",
           curve=True),
    Figure("episode_metric", f"Mean metric {_HUNDRED}",
           lambda s: getattr(s, "episodes", s).metrics, _BOTH, label="metric", tag="metrics",
           curve=True),
    Figure("evaluation_return", f"Mean return {_NEWEST}", "evaluation.mean_return", unit="any",
           curve=True),
    Figure("evaluation_length", f"Mean episode length {_NEWEST}", "evaluation.mean_length",
           unit="frames"),
    Figure("evaluation_metric", f"Mean metric {_NEWEST}", "evaluation.metrics", label="metric",
           tag="evaluation_metrics", curve=True),
    Figure("evaluation_episodes", f"Episodes {_NEWEST}", "evaluation.count"),
    Figure("evaluation_version", f"policy_version {_NEWEST}", "evaluation.policy_version"),
    Figure("evaluation_age", f"Age {_NEWEST}", "evaluation.age_s", unit="s"),
    Figure("evaluated_episodes", "Episodes played in evaluations", "num_evaluated", (WORKER,),
           rises=True),
    Figure("lag_mean", "Mean policy lag of delivered frames", "lag.mean", _BOTH, "versions",
           columns={"": "lag"}),
    Figure("lag_max", "Highest policy lag of delivered frames", "lag.max", unit="versions"),
    Figure("trainer_share", "Share of the trainer's time, by what it does",
           lambda s: vars(s.trainer), unit="share", label="activity", tag="trainer_share"),
    Figure("share", "Share of the workers' time, by what they do; transfer and cpu overlap",
           lambda s: vars(s.times), _BOTH, "share", label="activity", tag="worker_share",
           columns={"env": "env", "policy": "policy", "wait": "waits"}),
    Figure("inference_queue", "Mean time until an inference server computed a request",
           "inference.queue_s", unit="s"),
    Figure("inference_forward", "Mean time of the policy in an inference server",
           "inference.forward_s", unit="s"),
    Figure("inference_envs", "Mean number of envs computed at once by an inference server",
           "inference.num_envs"),
    Figure("inference_fill", "Share of what an inference server computed that was no padding",
           "inference.fill", unit="share"),
    Figure("bytes", "Size of fetched rollouts", "num_bytes", unit="bytes", rises=True),
    Figure("ready_rollouts", "Rollouts that are ready and not delivered", "num_ready"),
    Figure("restarts", "Processes of workers and servers that were replaced", "num_restarts",
           _BOTH, rises=True, columns={"": "restarts"}),
    Figure("env_faults", "How often envs raised", "num_env_faults", _BOTH, rises=True),
    Figure("lost_frames", "Frames stepped and not delivered", "num_lost", _BOTH, rises=True,
           columns={"": "lost"}),
    Figure("workers", "Workers that are ready", _num_ready),
    Figure("up", "1 if it is ready, else 0", lambda w: w.state == "ready", (WORKER,)),
    Figure("logged", "Logged by collector.log()", "logged", unit="any", label="name", tag="",
           curve=True),
)  # fmt: skip
