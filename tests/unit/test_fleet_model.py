"""The served model and its tokenizer while workers with other models come and go."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import create_autospec

from helpers.bundled_tokenizer import build_once
from helpers.fake_dispatcher import CARD, FakeDispatcher
from helpers.http_client import endless
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router.api.served import Served, ServedModel
from kvasir.router.config import RouterConfig
from kvasir.router.convert import group_of
from kvasir.router.fleet_model import FleetModel
from kvasir.router.member import Member
from kvasir.router.text.tokenizer import ModelTokenizer
from kvasir.router.worker_link import WorkerLink

FILES_A, FILES_B = {"tokenizer.json": b"a"}, {"tokenizer.json": b"b"}


def member(name: str, files: dict[str, bytes] | None) -> Member:
    """A worker whose model and tokenizer are called as it is."""
    link = create_autospec(WorkerLink, instance=True)
    link.fetch_tokenizer.return_value = files
    info = pb.WorkerInfo(worker_id=name, model=name, tokenizer_hash=name)
    return Member(name, "", link, info=info, group=group_of(info))


def served(model: FleetModel) -> str | None:
    model.settle()
    card = model.card()
    return None if card is None else card.name


def test_the_first_model_is_served_until_only_another_takes_requests() -> None:
    a, b = member("a", FILES_A), member("b", FILES_B)
    members = {"a": a}
    model = FleetModel(members)
    assert served(model) == "a"
    members["b"] = b
    assert served(model) == "a"
    a.silent = True
    assert served(model) == "a", "what is lost may come back"
    a.draining = b.draining = True
    assert served(model) == "a", "there is no other"
    b.draining = False
    assert served(model) == "b"
    a.draining = False
    assert served(model) == "b"
    b.role = "prefill"
    assert served(model) == "a", "b alone can serve nothing"
    del members["a"]
    assert served(model) == "b"


def test_who_is_not_used_is_told_why() -> None:
    a, b = member("a", FILES_A), member("b", FILES_B)
    model = FleetModel({"a": a, "b": b})
    assert a.group is not None
    assert b.group is not None
    assert (model.objection(a.group), model.objection(b.group)) == ("", "")
    model.settle()
    assert model.objection(a.group) == ""
    assert model.objection(b.group) == "has model 'b'; this router serves 'a'"
    other_tokenizer = replace(a.group, tokenizer_hash="b")
    assert "another tokenizer" in model.objection(other_tokenizer)
    assert model.objection(replace(a.group, revision="r2")) == ""


async def test_files_are_never_kept_under_another_model_s_hash() -> None:
    """The one worker of the model leaves while it is asked, and another model takes over."""
    a, b = member("a", None), member("b", FILES_B)
    members = {"a": a, "b": b}
    model = FleetModel(members)
    model.settle()

    async def leave() -> None:
        del members["a"]
        model.settle()

    a.link.fetch_tokenizer = leave  # type: ignore[method-assign] # a worker that leaves
    assert await model.tokenizer_files() is None
    assert await model.tokenizer_files() == FILES_B
    members.clear()
    members["a"] = member("a", FILES_A)
    model.settle()
    assert await model.tokenizer_files() == FILES_A


async def test_a_tokenizer_is_served_with_its_own_model_alone() -> None:
    """The model changes while the API asks for the files of the one before."""
    other = replace(CARD, name="other", tokenizer_hash="other")

    class Changing(FakeDispatcher):
        async def tokenizer_files(self) -> dict[str, bytes] | None:
            await asyncio.sleep(0)
            self.card = other
            return FILES_B

    built: list[Mapping[str, bytes]] = []

    def build(files: Mapping[str, bytes]) -> ModelTokenizer:
        built.append(files)
        return build_once(fake.files)

    fake = Changing(endless)
    served_model = ServedModel(RouterConfig(workers_file=Path("unused")), fake, build)
    served = await served_model.resolve(None)
    served_model.close()
    assert isinstance(served, Served)
    assert served.card == other
    assert built == [FILES_B]
