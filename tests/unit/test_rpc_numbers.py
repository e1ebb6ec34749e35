"""Torch's numbers of peers: simulated agents, whose 100,000 workers are replaced in turn."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distcollect.net.messages import PeerAddress
from distcollect.transport import rpc_agents
from distcollect.transport.rpc_agents import RpcAgents

NUM_REPLACED, NUM_PRESENT = 100_000, 100


class SimulatedAgent:
    """As torch's: it connects to a number once, and never to another process under that number."""

    def __init__(self, store: Any, name: str, number: int, *_: Any) -> None:
        self.store = store
        self.number = number
        self.members: set[int] = set()
        self.connected: dict[int, str] = {}
        self.has_ended = False
        store.set(f"addrs/{name}", "uv://127.0.0.1:1")

    def _update_group_membership(self, info: Any, _: Any, __: Any, is_join: bool) -> None:
        (self.members.add if is_join else self.members.remove)(info.number)

    def reached(self, info: Any) -> str:
        """The process that a call to a number reaches."""
        assert not self.has_ended
        assert info.number != self.number
        assert 0 < info.number < 2**15
        endpoint = self.store.get(f"addrs/{info.name}").decode()
        return self.connected.setdefault(info.number, endpoint)

    def join(self, _: bool) -> None: ...

    def shutdown(self) -> None:
        self.has_ended = True


class SimulatedRpc:
    """What :mod:`distcollect.transport.rpc_agents` uses of ``torch.distributed.rpc``."""

    def __init__(self) -> None:
        self.agents: list[SimulatedAgent] = []
        self.api = self
        self.current: SimulatedAgent | None = None
        self.TensorPipeAgent = SimulatedAgent

    def WorkerInfo(self, name: str, number: int) -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(name=name, number=number)

    def TensorPipeRpcBackendOptions(self, **_: Any) -> None: ...  # noqa: N802 - torch's name

    def _is_current_rpc_agent_set(self) -> bool:
        return self.current is not None

    def _reset_current_rpc_agent(self) -> None:
        self.current = None

    def _init_rpc_states(self, agent: SimulatedAgent) -> None:
        assert self.current is None
        self.current = agent
        self.agents.append(agent)

    def _finalize_shutdown(self) -> None:
        assert self.current is not None
        self.current.shutdown()
        self.current = None

    def rpc_async(self, info: Any, *_: Any, **__: Any) -> torch.futures.Future[str]:
        assert self.current is not None
        answer: torch.futures.Future[str] = torch.futures.Future()
        answer.set_result(self.current.reached(info))
        return answer


def test_a_number_never_names_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimulatedRpc()
    monkeypatch.setattr(rpc_agents, "rpc", simulated)
    monkeypatch.setattr(rpc_agents, "missing_symbols", list)
    agents = RpcAgents("127.0.0.1")
    present: deque[Any] = deque()
    for process in range(NUM_REPLACED):
        endpoint = f"uv://127.0.0.1:{process}"
        peer = agents.add(PeerAddress(endpoint))
        present.append(peer)
        assert agents.call(peer, None, ()).value() == endpoint
        if len(present) > NUM_PRESENT:
            agents.remove(present.popleft())
    assert [agents.call(peer, None, ()).value() for peer in present] == [
        peer.address.endpoint for peer in present
    ]
    agents.close(gently=True)
    assert all(agent.has_ended for agent in simulated.agents)
