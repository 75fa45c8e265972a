"""Blocked network access in the tests of evaluation."""

from __future__ import annotations

import socket
from typing import Any

import pytest

HERE = ("127.0.0.1", "localhost")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attempt fails the test, but for servers of its own."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def connect_here(own: socket.socket, address: Any) -> None:
        if own.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in HERE:
            pytest.fail(f"asked for {address}")
        connect(own, address)

    def look_up_here(host: Any, *arguments: Any, **keywords: Any) -> Any:
        if host not in HERE:
            pytest.fail(f"asked for {host}")
        return look_up(host, *arguments, **keywords)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
