"""The parts of a ModelService that say what a worker computes: the model, and the engine.

As in modelservice.py, whose rules hold here too.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from kvasir.operator.fields import Size, Source, Strict, Text, refuse, rules

ServedName = Annotated[str, Text("[!-~]+", 253, "a model name", "use ASCII without spaces")]

_INT8_ACTIVATIONS_ALONE = (
    "activationQuantization int8 needs quantization int8; set both, or neither"
)


class Model(Strict):
    """The model that is served."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.activationQuantization == 'none' || self.quantization == 'int8'",
                _INT8_ACTIVATIONS_ALONE,
                ".activationQuantization",
            )
        )
    )

    source: Annotated[str, Source()]
    """Where the weights are: bundled://NAME, in the worker's image; pvc://CLAIM/PATH, in a
    PersistentVolumeClaim; or file:///PATH, for kvasir up alone: in a cluster use pvc. Not yet:
    hf://ORG/NAME@REVISION. A change rolls out new workers."""
    served_name: ServedName | None = None
    """Model name in API requests. Left out: the name of the ModelService."""
    max_model_len: Annotated[int, Field(ge=1, le=2**24)] = 2048
    """Longest prompt plus output, in tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. auto: bfloat16 where it is the faster one: on GPUs, and on
    x86 CPUs with AVX2; else float32."""
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """Type that weights are quantized to when they are loaded; activations stay in dtype. int8: a
    scale for each output. int4: a scale and a minimum for each 32 inputs. Not yet: fp8."""
    activation_quantization: Literal["none", "int8"] = "none"
    """int8: activations are quantized too, which is faster for many tokens at once, and less
    exact. Needs quantization int8."""

    @model_validator(mode="after")
    def _int8_both(self) -> "Model":
        if self.activation_quantization != "none" and self.quantization != "int8":
            raise refuse(_INT8_ACTIVATIONS_ALONE)
        return self


_DEFAULT_SPECULATIVE_TOKENS = 8
_NO_METHOD = (
    "numSpeculativeTokens needs a method; set method to ngram or draft, "
    "or remove numSpeculativeTokens"
)


class Speculative(Strict):
    """Speculative decoding."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.numSpeculativeTokens) || self.method != 'none'",
                _NO_METHOD,
                ".numSpeculativeTokens",
            )
        )
    )

    method: Literal["none", "ngram", "draft"] = "none"
    """Where drafted tokens come from: earlier text of the same request (ngram), or the model
    itself with layers left out (draft). Answers are the same with each."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=32)] | None = None
    """Most tokens drafted for a request in one step; fewer are where they would not pay. Needs a
    method. Left out: 8."""

    @model_validator(mode="after")
    def _tokens_of_a_method(self) -> "Speculative":
        if self.num_speculative_tokens is not None and self.method == "none":
            raise refuse(_NO_METHOD)
        return self

    @property
    def most_tokens(self) -> int:
        given = self.num_speculative_tokens
        return _DEFAULT_SPECULATIVE_TOKENS if given is None else given


class Engine(Strict):
    """What computes in each worker, and its limits."""

    type: Literal["native", "vllm"] = "native"
    """The inference engine. Not yet: vllm."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in a KV block."""
    kv_cache_memory: Annotated[int, Size("1", "1Pi")] = Field(
        default="512Mi", validate_default=True
    )
    """Memory for the KV cache of each worker, such as 512Mi or 20Gi. Workers without an
    accelerator request it of the scheduler, and 1Gi beside it; see resources."""
    max_batched_tokens: Annotated[int, Field(ge=1, le=2**24)] = 512
    """Most tokens in one step of a worker."""
    max_running_requests: Annotated[int, Field(ge=1, le=2**16)] = 64
    """Most sequences in one step of a worker."""
    prefix_caching: bool = True
    """Whether equal prefixes of prompts are computed once and their KV blocks reused."""
    speculative: Speculative = Speculative()
