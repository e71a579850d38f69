"""Other engines, each run by its own Python in its own environment, for comparison.

The script run.py speaks for the engine of a file: its class Rival, which is made of settings and
has a ``version`` and ``generate``. Such a file imports its engine and what comes with it, never
Kvasir. Arguments: the file, and JSON of RivalSettings (see rival.py). Messages out:

    {"ready": true, "version": "0.32.0"}                      once, when the model is loaded
    {"times": [[0.12, 0.15, ...], ...]}                       one for each line in

A line in is {"prompts": [[token id, ...], ...], "max_tokens": n}; ``times`` are the seconds
from submission, of all prompts at once, to each output token, for each prompt. Prefixes stay cached
from line to line. End of input ends the process.
"""
