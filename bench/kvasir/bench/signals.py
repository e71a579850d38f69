"""SIGTERM and SIGHUP end a bench as Ctrl-C does: whatever it started is ended and removed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP interrupt like SIGINT; the exit code is 128 + the signal's number.

    A signal that is ignored (SIGHUP under nohup) stays so. Only the main thread can heed signals:
    elsewhere they stay whoever's they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):  # a job in the background of a script ignores SIGINT
            raise KeyboardInterrupt
        on_ctrl_c(signal.SIGINT, frame)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
