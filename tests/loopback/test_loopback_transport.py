"""The in-process transport of the tests keeps the contract of transports."""

from __future__ import annotations

from helpers.transport_contract import Loopback, TransportContract


class TestLoopback(TransportContract):
    make = Loopback
