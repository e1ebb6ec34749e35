"""Weights in one flat buffer, and how a worker swaps them in."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from distcollect.errors import ArgumentTypeError, WeightsError
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.weight_layout import WeightLayout, check_range, checksum


class Net(nn.Module):
    """Tied parameters, buffers, five dtypes, unaligned sizes, empty and scalar tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.first.weight
        self.small = nn.Parameter(torch.randn(3).half())
        self.brain = nn.Parameter(torch.randn(7).bfloat16())
        self.scale = nn.Parameter(torch.randn(()).double())
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.randn(9), persistent=False)


def randomised() -> Net:
    net = Net()
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 10)
    return net


def unpacked(layout: WeightLayout, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    views = layout.views(flat)
    return {
        name: view
        for entry, view in zip(layout.entries, views, strict=True)
        for name in entry.names
    }


def packed(net: nn.Module, source: Any = None) -> torch.Tensor:
    layout = WeightLayout.of(net)
    flat = layout.empty()
    layout.pack(layout.select(net if source is None else source), flat)
    return flat


def test_all_values_come_through() -> None:
    net = randomised()
    layout = WeightLayout.of(net)
    flat = packed(net)
    values = unpacked(layout, flat)
    state = net.state_dict()
    assert values.keys() == state.keys()
    for name, value in values.items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name])
        assert value.data_ptr() == 0 or value.data_ptr() % value.element_size() == 0
    assert len(layout.entries) == len(state) - 1, "a tied weight is there once"
    assert layout.num_bytes % 16 == 0
    assert WeightLayout.of(None).num_bytes == 0
    assert not flat.requires_grad
    covered = torch.zeros_like(flat, dtype=torch.bool)
    for entry in layout.entries:
        covered[entry.offset : entry.offset + entry.num_bytes] = True
    assert not flat[~covered].any(), "the gaps would make a checksum depend on chance"


SOURCES: dict[str, Any] = {
    "without the second name of a tied one": lambda net: {
        name: value for name, value in net.state_dict().items() if name != "tied.weight"
    },
    "without the first name of a tied one": lambda net: {
        name: value for name, value in net.state_dict().items() if name != "first.weight"
    },
}


@pytest.mark.parametrize("source", SOURCES)
def test_sources(source: str) -> None:
    net = randomised()
    assert torch.equal(packed(Net(), SOURCES[source](net)), packed(net))


def _changed(**changes: Any) -> dict[str, Any]:
    state = {**Net().state_dict(), **{name.replace("__", "."): v for name, v in changes.items()}}
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (_changed(first__bias=None), "missing key 'first.bias'"),
        (_changed(norm__running_var=None), "missing key 'norm.running_var'"),
        (_changed(first__weight=None, tied__weight=None), "missing key 'first.weight'"),
        (_changed(module__x=torch.ones(1)), "unknown key 'module.x'"),
        (
            _changed(first__bias=torch.ones(4)),
            r"'first.bias' has shape \[4\], the policy needs \[5\]",
        ),
        (
            _changed(scale=torch.ones(())),
            "'scale' has dtype float32, the policy needs float64",
        ),
        (_changed(small=None, first__bias=torch.ones(1)), "missing key 'small'; 'first.bias' has"),
        ({}, r"missing key 'small'; .* \(and 7 more\)\. Nothing was sent"),
        (nn.Linear(3, 5), "unknown key 'weight'"),
        (TensorDict({"small": torch.ones(3).half()}, []), "missing key 'brain'"),
    ],
)
def test_weights_that_do_not_fit(weights: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        WeightLayout.of(Net()).select(weights)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (_changed(small=[1.0, 2.0, 3.0]), "'small' is a list, not a tensor"),
        ([torch.ones(1)], "not list"),
        (3, "not int"),
        (lambda x: x, "not function"),
    ],
)
def test_what_is_no_weights(weights: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        WeightLayout.of(Net()).select(weights)


@pytest.mark.parametrize("beside", [0.0, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    ("value", "dtype", "advice"),
    [
        (-1e6, torch.float16, "use 'bfloat16'"),
        (torch.finfo(torch.float32).min, torch.float16, r"exclude=\['mask'\], or give no wire"),
        (torch.finfo(torch.float32).min, torch.bfloat16, r"exclude=\['mask'\], or give no wire"),
        (1e6, torch.bfloat16, None),
        (60_000.0, torch.float16, None),
    ],
)
def test_too_large_for_a_narrow_dtype(
    value: float, dtype: torch.dtype, advice: str | None, beside: float
) -> None:
    weights = {"mask": torch.tensor([value, beside])}
    if advice is None:
        check_range(weights, dtype)
        return
    with pytest.raises(WeightsError, match=f"'mask' holds a value .*: .*{advice}") as caught:
        check_range(weights, dtype)
    assert ("use 'bfloat16'" in str(caught.value)) == (advice == "use 'bfloat16'")


def test_checksum_sees_every_byte() -> None:
    flat = packed(randomised())
    right = checksum(flat)
    for index in range(len(flat)):
        flat[index] ^= 0x40
        assert checksum(flat) != right
        flat[index] ^= 0x40
    assert checksum(flat) == right
    assert checksum(WeightLayout.of(None).empty()) == 0


# LiveWeights.


def offered(live: LiveWeights, value: float, version: int) -> torch.Tensor:
    buffer = live.spare()
    for view in live.layout.views(buffer):
        view.fill_(value)
    live.commit(buffer, version)
    return buffer


def test_a_version_is_used_once_it_is_applied() -> None:
    net = Net()
    live = LiveWeights(net)
    parameters = dict(net.named_parameters())
    optimiser = torch.optim.SGD(net.parameters(), lr=1)
    assert (live.version, live.newest, live.pending) == (0, 0, False)
    offered(live, 1, 5)
    assert (live.version, live.newest, live.pending) == (0, 5, True)
    assert not (net.first.bias == 1).all()
    live.apply()
    assert (live.version, live.newest, live.pending) == (5, 5, False)
    for tensor in net.state_dict().values():
        assert (tensor == 1).all()
    assert net.tied.weight is net.first.weight
    assert all(parameter is parameters[name] for name, parameter in net.named_parameters())
    net.first(torch.ones(2, 3)).sum().backward()
    optimiser.step()
    assert (net.first.bias == -1).all()
    live.apply()  # without a new version nothing happens
    assert live.version == 5


def test_versions_are_copied_to_where_the_weights_are() -> None:
    """What has noted the weights' addresses, as a CUDA graph does, computes with each version.

    So do buffers that a forward pass assigns anew.
    """
    net = nn.BatchNorm1d(3)
    noted = [tensor.detach() for tensor in net.state_dict().values()]
    live = LiveWeights(net, in_place=True)
    buffers = set()
    for version in range(1, 8):
        buffers.add(offered(live, version, version).data_ptr())
        offered(live, version, version)
        live.apply()
        assert all((weights == version).all() for weights in noted)
        assert net.running_mean.shape == (3,)
        with torch.inference_mode():  # as workers call policies
            net.running_mean = torch.full((5,), -1.0)
        copied = torch.zeros(live.layout.num_bytes, dtype=torch.uint8)
        live.copy_newest(copied)
        assert all((view == version).all() for view in live.layout.views(copied))
    assert len(buffers) <= 3


def test_what_rollouts_were_asked_for_is_kept_however_many_versions_come() -> None:
    net = nn.Linear(1, 1)
    live = LiveWeights(net, keeps_each=True)
    for version in range(1, 40):
        offered(live, version, version)
        if version in (3, 20):
            live.expect(version)
    for version in (3, 20, 39):
        live.apply(up_to=version)
        assert live.version == net.weight.item() == version
    buffers = {offered(live, version, version).data_ptr() for version in range(40, 100)}
    assert len(buffers) < 15, "what was asked for before is not kept for good"


def test_two_threads_never_tear_a_version() -> None:
    """Between two applies, the stepping thread sees one whole version."""
    net = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    live = LiveWeights(net)
    stop, copied = threading.Event(), live.layout.empty()
    last, is_whole = 0, True

    def receive() -> None:
        nonlocal last, is_whole
        while not stop.is_set():
            version = last + 1
            buffer = live.spare()
            views = live.layout.views(buffer)
            if version % 5 == 4:  # an interrupted broadcast
                views[0].fill_(-1)
                live.discard(buffer)
            else:
                for view in views:
                    view.fill_(version)
                live.commit(buffer, version)
                live.copy_newest(copied)
                newest = [view.aminmax() for view in live.layout.views(copied)]
                is_whole &= all(low == high == version for low, high in newest)
            last = version

    thread = threading.Thread(target=receive)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    applied = set()
    try:
        thread.start()
        before = 0
        while len(applied) < 300:
            if live.pending:
                live.apply()
                assert live.version > before
                before = live.version
                applied.add(before)
            for tensor in net.state_dict().values():
                low, high = tensor.aminmax()
                assert live.version == 0 or low == high == live.version
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    live.apply()
    assert live.version in (last, last - 1)
    assert is_whole, "the newest version may be read while an older one is applied"


def test_a_buffer_with_two_names_in_one_module_is_put_back_under_both():
    module = nn.Module()
    buffer = torch.zeros(2)
    module.register_buffer("first", buffer)
    module.register_buffer("second", buffer)
    live = LiveWeights(module)
    module.second = module.second + 1  # as a forward pass may do
    live.commit(live.spare().zero_(), 1)
    live.apply()
    assert module.second is module.first


def test_a_tied_weight_with_nan_is_the_same_under_both_names():
    net = nn.Linear(2, 2, bias=False)
    layout = WeightLayout.of(nn.ModuleDict({"one": net, "two": net}))
    value = torch.tensor([[float("nan"), 1.0], [float("inf"), 2.0]])
    given = {"one.weight": value, "two.weight": value.clone()}
    assert layout.select(given)["one.weight"] is value
    given["two.weight"][0, 1] = 3.0
    with pytest.raises(WeightsError, match="differ"):
        layout.select(given)
