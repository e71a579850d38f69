"""Messages to a worker that it accepts."""

from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import kv_transfer_pb2 as kv_pb
from kvasir.worker.service.requests import Limits

LIMITS = Limits(vocab_size=1000, max_model_len=100, block_size=16)


def sampling() -> pb.SamplingParams:
    return pb.SamplingParams(
        top_p=1, repetition_penalty=1, max_tokens=10, logprobs=-1, prompt_logprobs=-1
    )


def submit() -> pb.Submit:
    return pb.Submit(request_id="r1", prompt_token_ids=[1, 2, 999], sampling=sampling())


def prefill() -> kv_pb.PrefillRequest:
    return kv_pb.PrefillRequest(
        request_id="r1", token_ids=range(40), num_output_tokens=3, sampling=sampling()
    )
