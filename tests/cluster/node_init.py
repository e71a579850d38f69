"""The first process of a node's namespaces: keeps them alive and reaps what is orphaned in them.

When it ends, the kernel ends every other process of its PID namespace.
"""

import contextlib
import os
import signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
while True:
    signal.sigwait({signal.SIGCHLD})
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
