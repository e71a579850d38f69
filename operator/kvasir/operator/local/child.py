"""Runs a command that dies with its parent: ``child.py PARENT_PID COMMAND...`` (Linux only).

A process killed with SIGKILL cannot stop its children. This wrapper asks the kernel to do
it (PR_SET_PDEATHSIG survives exec), then becomes the command, so that pid and parent stay
the same. It runs as a script, without site packages, and imports nothing of Kvasir;
``dies_with_us`` is the command line that runs it.

The signal is bound to the parent *thread* that forked: only a thread that outlives the command,
as the main thread does, may start it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def dies_with_us(command: list[str]) -> list[str]:
    """The command line of ``command`` as a child of this process; unchanged but on Linux."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    # A parent that died before prctl sends no signal any more.
    if os.getppid() != int(parent):
        sys.exit("the parent process is gone")
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
