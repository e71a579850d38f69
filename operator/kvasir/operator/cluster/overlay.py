"""A user's overlay on a pod template: ``spec.<role>.template`` over what the operator made. Pure.

The rules are those of ``kubectl patch --type=strategic``, so far as pods need them:

- Objects are merged key by key; the overlay's value wins; null removes a key.
- Entries of the lists in ``_KEYS`` are merged with the entry that has the same key: a container
  named ``worker`` or ``router`` changes the operator's own, any other name adds a container.
- Any other list replaces the operator's.

The overlay is not validated here: the API server does that when it gets the Deployment. Only
what would take pods away from their selectors is named by ``problems``.

Reference: https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvasir.operator.cluster import names

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "ports": "containerPort",
    "resourceClaims": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""List -> the key by which Kubernetes merges its entries."""

_DEEPEST = 64
"""Levels of an overlay; the fields of a pod template have about a dozen."""

_OWN_LABELS = frozenset(names.labels("", "worker", "decode")) | {
    names.REVISION_LABEL,
    names.POD_REVISION_LABEL,
}


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``overlay`` over it; both stay as they are."""
    merged = dict(base)
    for field, value in overlay.items():
        if value is None:
            merged.pop(field, None)
        else:
            merged[field] = _merged(field, merged.get(field), value)
    return merged


def problems(path: str, template: Mapping[str, Any]) -> Iterator[str]:
    """What an overlay at ``path`` must not say, each with its fix."""
    if deeper_than(_DEEPEST, template):
        yield f"{path}: nested more than {_DEEPEST} deep; no pod template is, remove what is none"
        return
    metadata = template.get("metadata", {})
    labels = metadata.get("labels", {}) if isinstance(metadata, Mapping) else None
    if not isinstance(labels, Mapping):
        yield f"{path}.metadata: its labels are no map; write labels as KEY: VALUE, or remove it"
        return
    for label in sorted(_OWN_LABELS.intersection(labels)):
        yield f"{path}.metadata.labels: {label} is set by the operator; remove it"


def deeper_than(levels: int, value: Any) -> bool:
    """Whether mappings and lists are nested so deep. Without recursion: it may be thousands."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [
            each
            for one in layer
            if isinstance(one, Mapping | list)
            for each in (one.values() if isinstance(one, Mapping) else one)
        ]
        if not layer:
            return False
    return True


def names_image(template: Mapping[str, Any], container: str) -> bool:
    """Whether an overlay gives a container another image than the operator's."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    return any(
        isinstance(each, Mapping) and each.get("name") == container and bool(each.get("image"))
        for each in (containers if isinstance(containers, list) else ())
    )


def _merged(field: str, base: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return merge(base if isinstance(base, Mapping) else {}, value)
    key = _KEYS.get(field)
    if key is None or not isinstance(base, list) or not isinstance(value, list):
        return value
    return _merged_entries(key, base, value)


def _merged_entries(key: str, base: list[Any], overlay: list[Any]) -> list[Any]:
    """Entries of ``base``, changed where ``overlay`` has the same key, then its other ones."""
    entries = list(base)
    for entry in overlay:
        place = _place(key, base, entry)
        if place is None:
            entries.append(entry)
        else:
            entries[place] = merge(entries[place], entry)
    return entries


def _place(key: str, base: list[Any], entry: Any) -> int | None:
    if not isinstance(entry, Mapping):
        return None
    same = (place for place, own in enumerate(base) if own.get(key) == entry.get(key))
    return next(same, None)
