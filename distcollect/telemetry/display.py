"""Shows a snapshot in one line, or as a display on a terminal."""

from __future__ import annotations

import html
import importlib
import math
import os
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from distcollect.common import worker_prints
from distcollect.common.tables import counted, text_table
from distcollect.results import EnvFault, EpisodeStats, Stats, WorkerState, WorkerStats
from distcollect.telemetry.bottleneck import find_bottleneck
from distcollect.telemetry.figures import FIGURES

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_FIRST_AFTER_S = 2.0  # shorter runs need no display
_EVERY_S = 2.0  # drawing takes some 10 ms
_YEARS_S = 2 * 365 * 86400.0
_FORMATS = {"share": ".0%", "versions": ".2g"}  # by unit
# Lines of the display behind the first ones, besides those of workers.
_OTHER_LINES = 9
_NOTEBOOK_LINES = 40
_NOTEBOOK_HTML = (
    '<pre style="font-family: monospace; line-height: 1.3; white-space: pre-wrap">{}</pre>'
)

_on_screen = threading.Lock()  # a terminal has room for one display


def log_line(stats: Stats) -> str:
    """A snapshot in one line."""
    parts = [*_progress(stats), *_episodes(stats), *_evaluation(stats), _lag(stats)]
    parts += [_waiting(stats), *_lost(stats), *_logged(stats)]
    if stats.num_restarts:
        parts.append(counted(stats.num_restarts, "restart"))
    if stats.num_env_faults:
        parts.append(counted(stats.num_env_faults, "env fault"))
    return ", ".join(parts)


def summary(stats: Stats, num_envs: int) -> str:
    """A collector in a few words; ``num_envs``: of each of its workers."""
    state = "closed" if stats.ended else "running"
    envs = counted(num_envs, "env")
    if not stats.in_process:
        num_ready = sum(w.state == WorkerState.READY.value for w in stats.workers.values())
        envs = f"{num_ready} of {counted(len(stats.workers), 'worker')} ready, {envs} each"
    version = f"policy_version {stats.policy_version}"
    return f"{stats.collector}({state}, {envs}, {_frames(stats)}, {version})"


def rendered(stats: Stats, height: int) -> RenderableType:
    """Render a snapshot for a terminal of ``height`` lines."""
    from rich.console import Group  # noqa: PLC0415 - slow to import, and most runs have no terminal
    from rich.text import Text  # noqa: PLC0415

    *lines, last = _lines(stats, height)
    return Group(Text("\n".join(lines), overflow="ellipsis", no_wrap=True), Text(last))


def _lines(stats: Stats, height: int) -> list[str]:
    """Return a snapshot as lines of text; the last one is long."""
    shares = ((name, share) for name, share in vars(stats.trainer).items() if share >= 0.005)
    trainer = ", ".join(f"{name} {share:.0%}" for name, share in shares)
    rest = counted(stats.num_restarts, "restart"), counted(stats.num_ready, "rollout") + " ready"
    lines = [
        f"{stats.collector}: " + ", ".join(_progress(stats)),
        ", ".join([*_episodes(stats), _lag(stats), f"version {stats.policy_version}"]),
        *_evaluation(stats),
        *_logged(stats),
        f"trainer: {trainer or 'nothing yet'}",
        *_inference(stats),
        ", ".join([*_lost(stats), *rest, f"{stats.num_bytes / 1e6:,.0f} MB fetched"]),
    ]
    if stats.env_faults:
        lines.append(
            f"{counted(stats.num_env_faults, 'env fault')}, the last: "
            f"{fault_line(stats.env_faults[-1])}"
        )
    most = max(1, height - _OTHER_LINES - len(lines))
    # First those that aren't ready.
    chosen = sorted(stats.workers, key=lambda worker_id: stats.workers[worker_id].state == "ready")
    rows = [_row(worker_id, stats.workers[worker_id]) for worker_id in sorted(chosen[:most])]
    heads = [head for figure in FIGURES for head in figure.columns.values()]
    lines += text_table([["worker", "state", *heads], *rows], left={0, 1}).splitlines()
    left = Counter(stats.workers[worker_id].state for worker_id in chosen[most:])
    if left:
        lines.append("and " + ", ".join(f"{count:,} more {state}" for state, count in left.items()))
    return [*lines, str(find_bottleneck(stats))]


def _inference(stats: Stats) -> list[str]:
    found = stats.inference
    if not found.num_answers:
        return []
    took = f"{found.forward_s * 1e3:,.2f} ms, after {found.queue_s * 1e3:,.2f} ms in the queue"
    parts = f"{found.num_envs:,.1f} envs at once in {took}", f"{found.fill:.0%} no padding"
    return [f"inference: {', '.join(parts)}, {counted(found.num_restarts, 'restart')}"]


def _row(worker_id: int, worker: WorkerStats) -> list[str]:
    state = worker.state
    if worker.evaluates and state == WorkerState.READY.value:
        state = f"evaluating, {counted(worker.num_evaluated, 'episode')}"
    cells = [
        format(figure.values(worker)[label], _FORMATS.get(figure.unit, ",.0f"))
        for figure in FIGURES
        for label in figure.columns
    ]
    return [str(worker_id), state, *cells]


def fault_line(fault: EnvFault) -> str:
    """When and where an env raised, and what, in one line without control characters."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fault.time))
    line = f"{at}, worker {fault.worker_id} on {fault.host}: {' '.join(fault.message.split())}"
    return "".join(c if c.isprintable() else "?" for c in line)  # a terminal would obey them


def _progress(stats: Stats) -> list[str]:
    parts = [_frames(stats)]
    if stats.ended:
        parts.append(f"ended after {_duration(stats.elapsed_s)}")
    elif stats.remaining_s is not None:
        parts.append(f"{_duration(stats.remaining_s)} to go")
    return [
        *parts,
        f"{stats.frames_per_s:,.0f} frames/s now",
        f"{stats.mean_frames_per_s:,.0f} on average",
    ]


def _frames(stats: Stats) -> str:
    total = stats.total_frames
    if total == -1:
        return f"{stats.frames:,} frames"
    return f"{stats.frames:,} of {total:,} frames ({stats.frames / total:.0%})"


def _episodes(stats: Stats) -> list[str]:
    return _outcome(stats.episodes) if stats.episodes.count else ["no episode yet"]


def _evaluation(stats: Stats) -> list[str]:
    newest = stats.evaluation
    if not newest.count:
        return []
    age = "" if math.isnan(newest.age_s) else f", {_duration(newest.age_s)} ago"
    outcome = ", ".join(_outcome(newest))
    return [f"evaluation of version {newest.policy_version}{age}: {outcome}"]


def _outcome(episodes: EpisodeStats) -> list[str]:
    spread = f"{episodes.min_return:,.4g} to {episodes.max_return:,.4g}"
    return [
        counted(episodes.count, "episode"),
        f"return {episodes.mean_return:,.4g} ({spread})",
        f"length {episodes.mean_length:,.4g}",
        *(f"{name} {value:,.4g}" for name, value in episodes.metrics.items()),
    ]


def _logged(stats: Stats) -> list[str]:
    logged = [f"{name} {value:,.4g}" for name, value in stats.logged.items()]
    return [f"logged: {', '.join(logged)}"] if logged else []


def _lag(stats: Stats) -> str:
    return f"lag {stats.lag.mean:.2g} (at most {stats.lag.max})"


def _waiting(stats: Stats) -> str:
    waits = stats.trainer.collect + stats.trainer.transfer + stats.trainer.weights
    workers = "" if stats.in_process else f", workers wait {stats.times.wait:.0%}"
    return f"trainer waits {waits:.0%} of the time{workers}"


def _lost(stats: Stats) -> list[str]:
    lost = [f"{cause} {count:,}" for cause, count in stats.lost.items()]
    if stats.may_be_lost:
        lost.append(f"at most {stats.may_be_lost:,} more")
    return [f"lost: {', '.join(lost)}"] if lost else []


def _duration(seconds: float) -> str:
    if seconds > _YEARS_S:  # a total may stand for "endless"
        return "years"
    return str(timedelta(seconds=round(seconds)))


class Display:
    """A display at the bottom of the terminal; what is printed meanwhile appears above it.

    So do the lines that local workers print, see :mod:`distcollect.common.worker_prints`.

    It closes when a tqdm progress bar appears, which needs the same lines of the terminal.
    """

    about = "the display"
    every_s = _EVERY_S

    def __init__(self, console: Console | None = None) -> None:
        """Show it on ``console``; None: on standard error, unless another display is there."""
        self._console = console
        self._live: Live | None = None
        self._gave_way = False
        worker_prints.expected.append(self)

    def write(self, stats: Stats) -> None:
        """Show a snapshot; the last one stays on the terminal."""
        if self._gave_way or (stats.elapsed_s < _FIRST_AFTER_S and self._live is None):
            return
        if _has_progress_bar():
            self._gave_way = True
            self.close()
            return
        if self._live is None and (stats.ended or not self._begin()):
            return
        assert self._live is not None
        with worker_prints.lock:
            self._live.update(rendered(stats, self._live.console.height), refresh=True)

    def close(self) -> None:
        """Leave the terminal as it was, with the last display above."""
        live, self._live = self._live, None
        if self in worker_prints.expected:
            worker_prints.expected.remove(self)
        if live is None:
            return
        try:
            with worker_prints.lock:
                worker_prints.print_line = None
                live.stop()
        finally:
            # Even if the terminal is gone.
            _streams.clear()
            _on_screen.release()

    def _begin(self) -> bool:
        from rich.console import Console  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        if not _on_screen.acquire(blocking=False):
            return False
        console = self._console or Console(stderr=True)
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=False,
            # Standard output that is redirected elsewhere must stay so.
            redirect_stdout=is_terminal(sys.stdout),
        )
        before = sys.stdout, sys.stderr
        with worker_prints.lock:
            self._live.start(refresh=True)
            worker_prints.print_line = lambda line: console.print(
                Text.from_ansi(line), soft_wrap=True
            )
        _streams[:] = before
        # A killed run must not leave the terminal without a cursor.
        console.show_cursor(True)
        return True


class NotebookDisplay:
    """A display in the output of the notebook's cell that runs when it first appears.

    It vanishes when a tqdm progress bar appears.
    """

    about = "the display"
    every_s = _EVERY_S

    def __init__(self) -> None:
        self._handle: Any = None
        self._gave_way = False

    def write(self, stats: Stats) -> None:
        """Show a snapshot; the last one stays in the notebook."""
        if self._gave_way:
            return
        if _has_progress_bar():
            self._gave_way = True
            if self._handle is not None:
                self._handle.update({"text/plain": ""}, raw=True)
        elif self._handle is not None:
            self._handle.update(_mime_bundle(stats), raw=True)
        elif stats.elapsed_s >= _FIRST_AFTER_S and not stats.ended:
            # It is there, as this is a notebook; it declares types in some versions only.
            ipython: Any = importlib.import_module("IPython.display")
            self._handle = ipython.display(_mime_bundle(stats), raw=True, display_id=True)

    def close(self) -> None:
        """Nothing to do."""


def _mime_bundle(stats: Stats) -> dict[str, str]:
    text = "\n".join(_lines(stats, _NOTEBOOK_LINES))
    return {"text/plain": text, "text/html": _NOTEBOOK_HTML.format(html.escape(text))}


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def is_terminal(stream: object) -> bool:
    """Whether it is a terminal where nobody types; it may be closed, None or any other object."""
    if hasattr(sys, "ps1"):  # the user types there
        return False
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        return False


def _has_progress_bar() -> bool:
    tqdm = sys.modules.get("tqdm")
    return tqdm is not None and bool(getattr(tqdm.tqdm, "_instances", ()))


_streams: list[Any] = []  # standard output and error before the display began


def _in_child() -> None:
    # The display's lock may have been held when this process was forked, e.g. for an env.
    if _streams:
        sys.stdout, sys.stderr = _streams


os.register_at_fork(after_in_child=_in_child)
