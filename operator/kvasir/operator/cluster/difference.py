"""Whether an object in the cluster says what is wanted. Pure.

The API server adds defaults to what is applied, and writes some values in its own way (``0.5`` as
``500m``). So an object is compared only in the fields that are wanted, and a value that differs
from what was applied, but is what the API server answered to exactly that, counts as equal.
"""

from collections.abc import Mapping
from typing import Any


def projection(seen: Any, wanted: Any) -> Any:
    """What ``seen`` says about the fields of ``wanted``; equal to ``wanted`` if it agrees."""
    if isinstance(wanted, Mapping):
        if not isinstance(seen, Mapping):
            # The API server drops an empty object where it means the same as none.
            return {} if seen is None and not wanted else seen
        return {key: projection(seen.get(key), value) for key, value in wanted.items()}
    if isinstance(wanted, list | tuple):
        if not isinstance(seen, list) or len(seen) != len(wanted):
            return [] if seen is None and not wanted else seen
        return [projection(one, other) for one, other in zip(seen, wanted, strict=True)]
    return seen
