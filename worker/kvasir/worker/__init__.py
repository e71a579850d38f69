"""A worker: model, paged KV cache, scheduler, KV transfer, its own health and load."""

import os

# Threads of torch's OpenMP wait for more work by spinning, by default for milliseconds: on cores
# that the kernels' threads and gRPC's need. It is read when torch is imported, so it is set here.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
