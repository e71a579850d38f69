"""Fixtures that tests of every tier may ask for, and one setting that must come before torch."""

import os

# One thread each, also in the processes that tests start: several with as many threads as the
# machine has cores spend most of their time waiting for each other at barriers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["cluster.fixtures"]
