"""Compares a forked worker, thing by thing, with one that was started by itself.

Both are started for a process that has changed nearly all of its own state since its zygote began.
The page Launching says that a worker is as the script is when it makes the collector.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from helpers.judge_launches import MARK, Condition

AS_THE_SCRIPT = {
    *("Cpus_allowed", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Uid", "Umask", "sys.path"),
    *("nice", "scheduler", "oom_score_adj", "personality", "folder", "root", "stdout", "stderr"),
}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a forked worker, and of one that was started by itself; each in a run of its own."""
    found = {}
    for zygote in ("keep", "off"):
        folder = tmp_path_factory.mktemp(zygote)
        ended = Condition(env={"DISTCOLLECT_ZYGOTE": zygote}).run(folder, "state")
        assert ended.code == 0, ended.output
        # The two runs differ by their folders.
        found[zygote] = _without(ended.seen["state"], str(folder))
    return found


def _without(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {name: _without(part, folder) for name, part in value.items()}
    if isinstance(value, list):
        return [_without(part, folder) for part in value]
    return value.replace(folder, "FOLDER") if isinstance(value, str) else value


def test_a_forked_worker_is_as_one_that_was_started_by_itself(states: dict[str, Any]) -> None:
    forked, alone = states["keep"]["worker"], states["off"]["worker"]
    differ = []
    for name in alone:
        one, other = forked[name], alone[name]
        if name == "environment":
            one, other = dict(one.items() - other.items()), dict(other.items() - one.items())
            for of_the_judge in ("DISTCOLLECT_ZYGOTE", MARK):
                assert one.pop(of_the_judge) != other.pop(of_the_judge)
        if one != other:
            differ.append(f"{name}: forked {one}, started by itself {other}")
    assert not differ, "\n".join(differ)


@pytest.mark.parametrize("zygote", ["keep", "off"])
def test_a_worker_is_as_the_script(states: dict[str, Any], zygote: str) -> None:
    worker, own = states[zygote]["worker"], states[zygote]["own"]
    names = [name for name in own if name in AS_THE_SCRIPT or name.startswith("RLIMIT_")]
    assert {name: worker[name] for name in names} == {name: own[name] for name in names}
    assert worker["environment"].items() >= own["environment"].items()
    assert "JUDGE_DELETED_LATE" not in worker["environment"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("zygote", ["keep", "off"])
def test_no_worker_keeps_a_user_that_the_script_has_given_up(
    states: dict[str, Any], zygote: str
) -> None:
    worker = states[zygote]["worker"]
    assert set(worker["Uid"]) == set(worker["Gid"]) == {"65534"}
    assert worker["Groups"] == ["7777"]
    assert worker["Umask"] == ["0027"]
