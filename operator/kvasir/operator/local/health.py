"""Whether a process lives: asks its /health again and again, as a kubelet does for a livenessProbe.

Owns one thread for each process that is asked. Decides nothing: how many failures in a row are too
many is supervision's part.
"""

import http.client
import threading
from dataclasses import dataclass

_OK = 200


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds."""

    period: float
    timeout: float


AS_IN_PODS = Timing(period=10.0, timeout=5.0)
"""Of the livenessProbe in cluster/pods.py."""


class HealthCheck:
    """Asks the process at ``address`` (host:port) until ``stop``."""

    def __init__(self, address: str, timing: Timing) -> None:
        self.failures = 0
        """In a row, up to now."""
        self._address = address
        self._timing = timing
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=f"health {address}", daemon=True).start()

    def stop(self) -> None:
        """Ask no more. Does not wait for an answer that is due."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._timing.period):
            healthy = is_healthy(self._address, self._timing.timeout)
            self.failures = 0 if healthy else self.failures + 1


def is_healthy(address: str, timeout: float) -> bool:
    """Whether GET /health is answered with 200, each part of the answer within ``timeout`` s."""
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == _OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
