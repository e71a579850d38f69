"""Set before anything imports torch; the processes that tests start inherit it.

One thread each: several processes with as many threads as the machine has cores spend most of
their time waiting for each other at barriers.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
