"""Whether a TCP port can be listened on."""

import socket


def choose_port(host: str, port: int) -> int | None:
    """``port`` if it is free, or any free one for 0; None if it is in use or not allowed."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections that linger after an earlier run are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return None
        chosen: int = probe.getsockname()[1]
        return chosen
