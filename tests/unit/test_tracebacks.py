"""The tracebacks that travel from workers to the trainer."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch
from torch import nn

import distcollect as dc
from distcollect.common.tables import text_table
from distcollect.transport.failure import Failure


def broken(observation: torch.Tensor) -> torch.Tensor:
    return deeper(observation)


def deeper(observation: torch.Tensor) -> torch.Tensor:
    try:
        return {}["no such level"]
    except KeyError as error:
        raise ValueError("not like this") from error


class Broken(gym.Wrapper):  # type: ignore[type-arg]
    def step(self, action: object) -> object:  # type: ignore[override]
        return deeper(torch.zeros(1))


def told(error: BaseException) -> str:
    """As from a worker: without the line of the test, which called the package."""
    assert error.__traceback__ is not None
    inner = error.with_traceback(error.__traceback__.tb_next)
    return Failure.of(inner, 3).remote_traceback


def check(text: str, *names: str) -> None:
    assert all(f"in {name}\n" in text for name in names)
    assert "KeyError: 'no such level'" in text
    assert text.endswith("ValueError: not like this\n")
    assert text.count("\nValueError") == 1, "an env that was made again raised the same"
    assert "/distcollect/" not in text.replace(__file__, "")
    assert "contextlib.py" not in text


def test_it_has_the_users_lines_only() -> None:
    with pytest.raises(dc.PolicyError) as caught:
        dc.SyncDataCollector("CartPole-v1", broken, frames_per_batch=4)
    check(told(caught.value), "broken", "deeper")
    with (
        dc.SyncDataCollector(
            lambda: Broken(gym.make("CartPole-v1")),
            frames_per_batch=4,
            faults=dc.Faults(max_env_faults=1),
        ) as collector,
        pytest.raises(dc.EnvError) as caught_env,
    ):
        collector.next()
    check(told(caught_env.value), "step", "deeper")


class Module(nn.Module):
    forward = staticmethod(deeper)


def test_it_has_no_lines_of_torch_between_a_module_and_its_forward() -> None:
    with pytest.raises(dc.PolicyError) as caught:
        dc.SyncDataCollector("CartPole-v1", nn.Sequential(Module()), frames_per_batch=4)
    text = told(caught.value)
    check(text, "forward", "deeper")
    assert "_call_impl" not in text


def test_without_lines_of_the_user_the_message_says_all() -> None:
    with pytest.raises(dc.PolicyError) as caught:
        dc.SyncDataCollector("CartPole-v1", lambda observation: torch.zeros(3), frames_per_batch=4)
    assert told(caught.value) == ""
    assert "Traceback" not in str(Failure.of(caught.value, 3).error())


def test_a_mistake_in_the_package_is_shown_in_full() -> None:
    with pytest.raises(TypeError) as caught:
        text_table(5)  # type: ignore[arg-type]
    assert "in text_table\n" in told(caught.value)
