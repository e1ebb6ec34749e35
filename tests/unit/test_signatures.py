"""The arguments of the collectors, as users see them in ``help()`` and in error messages."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
from typing import Any

import pytest

import distcollect as dc
from distcollect.collectors.options import CollectorOptions
from distcollect.collectors.signature import takes
from distcollect.collectors.worker_options import MultiSyncOptions, RPCOptions

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


@pytest.mark.parametrize("collector", COLLECTORS)
def test_tools_that_unwrap_functions_see_the_arguments(collector: Any) -> None:
    assert "create_env_fn" in inspect.signature(inspect.unwrap(collector.__init__)).parameters


def test_a_class_fixes_some_arguments() -> None:
    own = {collector: set(inspect.signature(collector).parameters) for collector in COLLECTORS}
    rpc = own[dc.RPCDataCollector]
    assert rpc - own[dc.MultiSyncDataCollector] == {"sync", "listen"}
    assert rpc - own[dc.MultiaSyncDataCollector] == {"sync", "listen"}
    assert rpc - own[dc.aSyncDataCollector] == {"sync", "listen", "num_workers"}
    assert own[dc.SyncDataCollector] < rpc
    with pytest.raises(dc.ArgumentError, match="MultiSyncDataCollector has no listen"):
        dc.MultiSyncDataCollector("CartPole-v1", frames_per_batch=8, listen=None)  # type: ignore[call-arg]


@pytest.mark.parametrize("collector", COLLECTORS)
def test_a_misspelled_argument_gets_a_suggestion(collector: Any) -> None:
    with pytest.raises(TypeError, match=r"'total_frame' \(did you mean 'total_frames'\?\)"):
        collector("CartPole-v1", frames_per_batch=8, total_frame=8)
    with pytest.raises(TypeError, match="no argument 'xyz'; there are: "):
        collector("CartPole-v1", frames_per_batch=8, xyz=8)


@pytest.mark.parametrize("collector", COLLECTORS)
def test_a_missing_argument_is_named(collector: Any) -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'frames_per_batch'"):
        collector("CartPole-v1")
    with pytest.raises(TypeError, match="missing a required argument: 'create_env_fn'"):
        collector(frames_per_batch=8)


def test_options_are_frozen_and_derive_what_they_imply() -> None:
    options = MultiSyncOptions(
        ["CartPole-v1"] * 3, frames_per_batch=12, total_frames=24, envs_per_worker=2
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.frames_per_batch = 6  # type: ignore[misc]
    assert (options.num_to_start, options.rollouts_per_batch, options.num_steps(2)) == (3, 3, 2)
    assert options.makers == ["CartPole-v1"] * 3
    assert options.batch_format.joins == "stack"
    assert not options.has_mask
    assert options.updater is options.updater
    masks = RPCOptions(
        "CartPole-v1",
        frames_per_batch=4,
        num_workers=2,
        staleness=dc.Staleness(3, mode="mask"),
    )
    assert masks.has_mask
    assert masks.mask_above == 3
    assert masks.rollouts_per_batch == 1


def test_no_text_is_written_twice() -> None:
    """Each text stands at the most general class that it is true for."""
    seen: dict[str, str] = {}
    for kind in (CollectorOptions, *CollectorOptions.__subclasses__()):
        for line in (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].split("\n    "):
            if line.strip() and not line.startswith(" ") and "create_env_fn" not in line:
                assert line not in seen, (line, kind, seen[line])
                seen[line] = kind.__name__


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
