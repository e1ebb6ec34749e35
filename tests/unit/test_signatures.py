"""The arguments of the collectors, as users see them in ``help()`` and in error messages."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import sys
from typing import Any

import pytest

import distcollect as dc
from distcollect.collectors.signature import takes

COLLECTORS = (
    dc.SyncDataCollector,
    dc.RPCDataCollector,
    dc.MultiSyncDataCollector,
    dc.MultiaSyncDataCollector,
    dc.aSyncDataCollector,
)


@pytest.mark.parametrize("collector", COLLECTORS)
def test_help_shows_each_argument_with_its_text(collector: type) -> None:
    parameters = inspect.signature(collector).parameters
    assert len(parameters) >= 25
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds == {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }
    assert list(parameters)[:2] == ["create_env_fn", "policy"]
    text = pydoc.plain(pydoc.render_doc(collector.__init__))
    doc = inspect.getdoc(collector.__init__) or ""
    for name in parameters:
        assert f"{name}: " in text.partition("-> None")[0]
        assert f"\n    {name}: " in doc
    assert doc.index("Args:") < doc.index("Raises:")


def test_a_class_fixes_some_arguments() -> None:
    own = {collector: set(inspect.signature(collector).parameters) for collector in COLLECTORS}
    rpc = own[dc.RPCDataCollector]
    assert rpc - own[dc.MultiSyncDataCollector] == {"sync", "listen", "security"}
    assert rpc - own[dc.MultiaSyncDataCollector] == {"sync", "listen", "security"}
    assert rpc - own[dc.aSyncDataCollector] == {"sync", "listen", "security", "num_workers"}
    assert own[dc.SyncDataCollector] < rpc
    with pytest.raises(dc.ArgumentError, match="MultiSyncDataCollector has no listen"):
        dc.MultiSyncDataCollector("CartPole-v1", frames_per_batch=8, listen=None)  # type: ignore[call-arg]


@pytest.mark.parametrize("collector", COLLECTORS)
def test_wrong_and_missing_names(collector: Any) -> None:
    for given, message in (
        ({"total_frame": 8}, r"'total_frame' \(did you mean 'total_frames'\?\)"),
        ({"xyz": 8}, "no argument 'xyz'; there are: "),
        ({}, "missing a required argument: 'frames_per_batch'"),
    ):
        with pytest.raises(TypeError, match=message):
            collector("CartPole-v1", **given)
    with pytest.raises(dc.ArgumentError, match=r"seed=3: call collector.set_seed\("):
        collector("CartPole-v1", frames_per_batch=8, seed=3)
    with pytest.raises(TypeError, match="missing a required argument: 'create_env_fn'"):
        collector(frames_per_batch=8)


def test_arguments_work_without_docstrings() -> None:
    """As under ``python -OO``."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        num_envs: int = 1

    class Collector:
        @takes(Options)
        def __init__(self, options: Options) -> None:
            self.options = options

    assert Collector(num_envs=3).options == Options(3)
    assert Collector.__init__.__doc__ is None


def test_the_traceback_of_a_wrong_argument_shows_the_users_line() -> None:
    with pytest.raises(dc.ArgumentError, match="41 can't be split") as caught:
        dc.MultiSyncDataCollector("CartPole-v1", frames_per_batch=41, num_workers=2)
    assert len(caught.traceback) <= 3


def test_a_mistyped_name_of_the_package_is_answered_by_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(AttributeError, match="Did you mean 'SyncDataCollector'"):
        dc.SyncDataCollecter  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'$"):
        dc.zzz  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError) as caught:
        dc.evaluate  # type: ignore[attr-defined] # noqa: B018
    sys.__excepthook__(caught.type, caught.value, caught.tb)
    said = capsys.readouterr().err
    assert said.count("Did you mean") == 1, said
