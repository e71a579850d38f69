"""What a ModelService asks for and a cluster cannot give yet. Pure.

Each is one line ``path: what; the fix``, for a condition of the ModelService.
"""

from collections.abc import Iterator

from kvasir.operator.cluster import multi_node, overlay
from kvasir.operator.cluster.names import WORKER_ROLES
from kvasir.operator.modelservice import ModelService, Role
from kvasir.operator.plan import Refused

_SOURCES = {
    "hf": "is not served yet; download the model into a volume and use pvc://CLAIM/PATH",
    "file": "is a path of one machine; put the model into a volume and use pvc://CLAIM/PATH",
}


def refusal(service: ModelService) -> Refused | None:
    """Why the service cannot run in a cluster; None if it can."""
    problems = tuple(_problems(service))
    return Refused(problems) if problems else None


def _problems(service: ModelService) -> Iterator[str]:
    spec = service.spec
    if not service.name[0].isalpha():
        yield "metadata.name: a Service's name begins with a letter; choose another name"
    yield from _source_problems(spec.model.source)
    if spec.model.quantization == "fp8":
        yield _not_served("model.quantization", "fp8", "none, int8 or int4")
    if spec.engine.type != "native":
        yield _not_served("engine.type", spec.engine.type, "native")
    for name in WORKER_ROLES:
        role = spec.prefill if name == "prefill" else spec.decode
        yield from _role_problems(name, role)
        yield from multi_node.problems(service, name, role)
    yield from overlay.problems("spec.router.template", spec.router.template or {})


def _source_problems(source: str) -> Iterator[str]:
    scheme, _, rest = source.partition("://")
    if scheme in _SOURCES:
        yield f"spec.model.source: {scheme}:// {_SOURCES[scheme]}"
    elif scheme == "pvc" and ".." in rest.split("/"):
        yield "spec.model.source: '..' leads out of the volume; write the path without it"


def _role_problems(name: str, role: Role) -> Iterator[str]:
    if not overlay.names_image(role.template or {}, "worker"):
        instead = "1, or a worker image of your own in the role's template"
        for kind, size in role.parallelism.model_dump().items():
            if size != 1:
                yield _not_served(f"{name}.parallelism.{kind}", size, instead)
    if role.accelerator is not None and role.resources is not None:
        resource = role.accelerator.resource_name
        for part, amounts in role.resources.model_dump().items():
            if resource in amounts:
                yield (
                    f"spec.{name}.resources.{part}: {resource} is set by "
                    f"spec.{name}.accelerator; remove one of the two"
                )
    yield from overlay.problems(f"spec.{name}.template", role.template or {})


def _not_served(field: str, value: object, instead: str) -> str:
    return f"spec.{field}: {value} is not served yet; use {instead}"
