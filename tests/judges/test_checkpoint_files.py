"""Judge of the files of a Checkpoint: whenever its process ends, a run goes on from a whole save.

Sessions of a run save by time, after the last batch, at a signal and for the best evaluation, and
some are killed in any line of the package. From docs/training.md and ``help(dc.Checkpoint)``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.judge_checkpoints import CheckpointAccount, Processes, Session
from helpers.judge_settings import drawn
from hypothesis import example, given
from hypothesis import strategies as st

CALLS = ["next", "next", "publish", "evaluate", "evaluate", "step", "step", "save", "time_passes"]
SCRIPTS = st.lists(
    st.sampled_from(CALLS).map(lambda name: (name,))
    | st.tuples(st.just("learn"), st.integers(-9, 9)),
    min_size=1,
    max_size=14,
)


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    script, killed_at = draw(SCRIPTS), {}
    end = draw(st.sampled_from(["by itself", "killed", "killed", "told"]))
    if end == "told":
        script.append(("is_told_to_end",))
    elif end == "killed":
        if draw(st.booleans()):
            script += [("learn", draw(st.integers(-9, 9))), ("evaluate",)]
        script.append((draw(st.sampled_from(["step", "save", "save"])),))
        killed_at[str(len(script) - 1)] = draw(st.integers(1, 400))
    return Session(
        script=script, killed_at=killed_at, has_workers=draw(st.sampled_from([False, False, True]))
    )


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


def best_of(value: int, **killed_at: int) -> Session:
    script = [("learn", value), ("evaluate",), ("save",)]
    return Session(script=script, killed_at=killed_at, has_workers=False)


@drawn(0.75)
@example(  # killed once the newest file is there, and that of the best is not
    run=[best_of(3), best_of(5, **{"2": 200}), best_of(4)], keep_last=1, total_frames=-1
)
@given(
    run=st.lists(sessions(), min_size=1, max_size=5),
    keep_last=st.integers(1, 3),
    total_frames=st.sampled_from([-1, -1, 16]),
)
def test_a_run_goes_on_from_its_newest_save(
    processes: Processes, run: list[Session], keep_last: int, total_frames: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        account = CheckpointAccount(Path(folder), keep_last, total_frames, processes)
        for session in run:
            account.play(session)
