"""The decoder's kernels for CPUs: C++ in ``cpp/``, built for the machine's best target.

Owns the sources, how and where they are built (``build``), the C interface (``library``) and the
layout of packed weights (``packed``). ``reference`` says in torch what each kernel computes.
Nothing here knows of requests or of models' files.
"""
