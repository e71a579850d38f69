"""What the components share.

Wire contracts: protobuf services, block hashing, refusal reasons, sampling parameters; they
do no I/O and hold no policy. ``process.py`` has the few things that every process of Kvasir
does alike.
"""
