"""Addresses that processes listen on, where a machine lacks IPv6."""

import errno
import socket
from typing import Any

import pytest

from kvasir.proto.process import listen_everywhere


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_without_ipv6_all_addresses_are_those_of_ipv4(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = socket.create_server

    def create_server(address: tuple[str, int], **options: Any) -> socket.socket:
        if address[0] == "::":
            raise OSError(number, "no IPv6 here")
        return real(("127.0.0.1", address[1]), **options)

    monkeypatch.setattr(socket, "create_server", create_server)
    with listen_everywhere(0) as server:
        assert server.family is socket.AF_INET


def test_a_port_in_use_is_told_and_not_half_taken() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen_everywhere(port)
