"""The Engine service of engine.proto: sessions, and what operators and newcomers ask."""

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from kvasir.proto.errors import Reason, Refusal
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.service.hub import SessionHub
from kvasir.worker.service.identity import WorkerIdentity
from kvasir.worker.service.session import Session, SessionContext, SlowRouterError

SERVICE = "kvasir.v1.Engine"

_TOKENIZER_CHUNK_BYTES = 256 * 1024

_log = logging.getLogger("kvasir.worker.service")

_SessionRpc = grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]
_RoleRpc = grpc.aio.ServicerContext[pb.SetRoleRequest, pb.WorkerInfo]


class EngineService:
    """One method for each RPC; see engine.proto for what they mean."""

    def __init__(
        self,
        context: SessionContext,
        hub: SessionHub,
        identity: WorkerIdentity,
        tokenizer_files: Mapping[str, bytes],
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._hub = hub
        self._identity = identity
        self._tokenizer_files = tokenizer_files

    def handler(self) -> grpc.GenericRpcHandler:
        """For ``server.add_generic_rpc_handlers``."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GetInfo": grpc.unary_unary_rpc_method_handler(
                self.get_info,
                request_deserializer=pb.GetInfoRequest.FromString,
                response_serializer=pb.WorkerInfo.SerializeToString,
            ),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(
                self.get_tokenizer,
                request_deserializer=pb.GetTokenizerRequest.FromString,
                response_serializer=pb.TokenizerChunk.SerializeToString,
            ),
            "Session": grpc.stream_stream_rpc_method_handler(
                self.session,
                request_deserializer=pb.RouterMessage.FromString,
                response_serializer=pb.WorkerMessage.SerializeToString,
            ),
            "Drain": grpc.unary_unary_rpc_method_handler(
                self.drain,
                request_deserializer=pb.DrainRequest.FromString,
                response_serializer=pb.DrainStatus.SerializeToString,
            ),
            "Undrain": grpc.unary_unary_rpc_method_handler(
                self.undrain,
                request_deserializer=pb.UndrainRequest.FromString,
                response_serializer=pb.DrainStatus.SerializeToString,
            ),
            "SetRole": grpc.unary_unary_rpc_method_handler(
                self.set_role,
                request_deserializer=pb.SetRoleRequest.FromString,
                response_serializer=pb.WorkerInfo.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def get_info(self, _request: pb.GetInfoRequest, _rpc: object) -> pb.WorkerInfo:
        return self._identity.info()

    async def get_tokenizer(
        self, _request: pb.GetTokenizerRequest, _rpc: object
    ) -> AsyncIterator[pb.TokenizerChunk]:
        for name, data in self._tokenizer_files.items():
            for start in range(0, max(len(data), 1), _TOKENIZER_CHUNK_BYTES):
                part = data[start : start + _TOKENIZER_CHUNK_BYTES]
                yield pb.TokenizerChunk(name=name, data=part)

    async def drain(self, _request: pb.DrainRequest, _rpc: object) -> pb.DrainStatus:
        return self.set_draining(True)

    async def undrain(self, _request: pb.UndrainRequest, _rpc: object) -> pb.DrainStatus:
        return self.set_draining(False)

    def set_draining(self, draining: bool, *, terminating: bool = False) -> pb.DrainStatus:
        """``terminating``: for good, as the process is about to end."""
        self._identity.set_draining(draining, terminating=terminating)
        self._engine.set_draining(self._identity.draining)
        load = self._engine.load()
        self._hub.report(load)
        return pb.DrainStatus(
            draining=self._identity.draining, running=load.running, waiting=load.waiting
        )

    async def set_role(self, request: pb.SetRoleRequest, rpc: _RoleRpc) -> pb.WorkerInfo:
        if request.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_BOTH):
            await rpc.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "role must be prefill, decode or both"
            )
        self._identity.set_role(request.role)
        self._hub.report(self._engine.load())
        return self._identity.info()

    async def session(self, messages: AsyncIterator[pb.RouterMessage], rpc: _SessionRpc) -> None:
        first = await anext(messages, None)
        if first is None or first.WhichOneof("kind") != "hello":
            await rpc.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
        hello = first.hello
        refusal = self._hello_refusal(hello)
        opened = pb.Opened(
            info=self._identity.info(), refusal=refusal.to_proto() if refusal else None
        )
        await rpc.write(pb.WorkerMessage(opened=opened))
        if refusal is not None:
            return
        session = Session(self._context, hello.router_id)
        _log.info("session opened router=%s", hello.router_id)
        try:
            with self._hub.joined(session, self._engine.load()):
                await session.run(messages, rpc.write)
        except SlowRouterError:
            _log.warning("session ended, too much was left unread router=%s", hello.router_id)
            await rpc.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "this router does not read what it asks for; its requests are aborted",
            )
        finally:
            _log.info("session closed router=%s", hello.router_id)

    def _hello_refusal(self, hello: pb.Hello) -> Refusal | None:
        if hello.expected_epoch in ("", self._identity.epoch):
            return None
        return Refusal(
            Reason.EPOCH_MISMATCH,
            f"this worker is epoch {self._identity.epoch}, not {hello.expected_epoch}",
        )
