"""From a WorkerConfig to a model that is ready to run.

Everything that can be refused is refused before the weights are read, with one line that
names the field and the fix.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.config import WorkerConfig
from kvasir.worker.kernels.library import Kernels, find_kernels
from kvasir.worker.kernels.memory import release_library_pages, return_free_memory
from kvasir.worker.model.backend import Decoder
from kvasir.worker.model.config import ModelConfig
from kvasir.worker.model.decoder import TorchDecoder
from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.footprint import Footprint, footprint
from kvasir.worker.model.kernel_decoder import KernelDecoder
from kvasir.worker.model.kv_cache import KvCache
from kvasir.worker.model.machine import computes_bfloat16, free_memory, usable_cores
from kvasir.worker.model.quantization import Quantization
from kvasir.worker.model.reader import WeightReader
from kvasir.worker.model.source import ModelSource, open_source
from kvasir.worker.model.weights import check_weights
from kvasir.worker.runner import TorchRunner
from kvasir.worker.speculation.draft_model import DraftModel

__all__ = ["LoadedModel", "ModelError", "load_model"]

_log = logging.getLogger("kvasir.worker")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, and what others must know of it.

    ``max_model_len`` is the configured one, which never exceeds the model's own.
    ``tokenizer_files``: see model/tokenizer_files.py.
    """

    runner: TorchRunner
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    layout: pb.KvLayout
    tokenizer_files: dict[str, bytes]

    @property
    def weight_bytes(self) -> int:
        return self.runner.weight_bytes


def load_model(config: WorkerConfig, progress: Callable[[str], None]) -> LoadedModel:
    """Load the configured model.

    Sets torch's thread count for this process. ``progress`` gets short lines for people,
    such as "reading weights 120 of 272".

    Raises:
        ModelError: the configuration cannot be served.
    """
    threads = config.threads or usable_cores()
    torch.set_num_threads(threads)
    device = _device(config)
    quantization = _quantization(config)
    progress(f"opening {config.model}")
    source = open_source(config.model)
    model = source.config
    _check_length(config, model)
    kernels = _kernels(config, device, progress)
    dtype = _dtype(config, device, kernels)
    num_blocks = _num_blocks(config, model, dtype)
    draft_layers = _draft_layers(config, model)
    check_weights(source.weights, model)
    _check_memory(config, footprint(model, dtype, quantization, packed=kernels is not None), device)
    # What is to be rounded is read as it is: to round twice is worse.
    read_as = dtype if quantization.weights == "none" else torch.float32
    reader = WeightReader(model, source.weights, read_as, device, progress)
    decoder = _decoder(config, reader, dtype, quantization, threads, kernels)
    _log.info(
        "computes with=%s dtype=%s quantization=%s speculation=%s threads=%d",
        "torch" if kernels is None else f"kernels-{kernels.target}",
        str(dtype).removeprefix("torch."),
        quantization.label,
        config.speculative_method,
        threads,
    )
    progress(f"allocating {num_blocks} KV blocks")
    cache = KvCache(model, num_blocks, config.block_size, dtype, device)
    return_free_memory()
    release_library_pages()
    draft = None
    if draft_layers is not None:
        draft = DraftModel(decoder.first_layers(draft_layers), source.eos_token_ids)
    return LoadedModel(
        runner=TorchRunner(decoder, cache, source.eos_token_ids, draft),
        vocab_size=model.vocab_size,
        eos_token_ids=source.eos_token_ids,
        max_model_len=config.max_model_len,
        layout=_layout(config, source, dtype, quantization),
        tokenizer_files=dict(source.tokenizer_files),
    )


def _kernels(
    config: WorkerConfig, device: torch.device, progress: Callable[[str], None]
) -> Kernels | None:
    """The CPU kernels, where they may serve this model and can be had."""
    if device.type != "cpu" or config.dtype not in ("auto", "bfloat16"):
        return None
    progress("loading the CPU kernels")
    kernels = find_kernels()
    if isinstance(kernels, Kernels):
        return kernels
    _log.warning(
        "no CPU kernels: %s; torch computes instead, at a quarter of the speed or less",
        kernels.reason,
    )
    return None


def _decoder(
    config: WorkerConfig,
    reader: WeightReader,
    dtype: torch.dtype,
    quantization: Quantization,
    threads: int,
    kernels: Kernels | None,
) -> Decoder:
    if kernels is not None:
        return KernelDecoder(
            reader,
            kernels,
            quantization=quantization,
            threads=threads,
            max_positions=config.max_model_len,
        )
    return TorchDecoder(
        reader, dtype=dtype, quantization=quantization, max_positions=config.max_model_len
    )


def _draft_layers(config: WorkerConfig, model: ModelConfig) -> int | None:
    """How many of the first layers draft; None without a draft model."""
    if config.speculative_method != "draft":
        return None
    layers = config.draft_layers or max(1, model.num_layers * 4 // 5)
    if layers >= model.num_layers:
        raise ModelError(
            "draft_layers",
            f"{layers} layers are no less work than all {model.num_layers}",
            f"set it to at most {model.num_layers - 1}",
        )
    return layers


def _device(config: WorkerConfig) -> torch.device:
    present = torch.cuda.is_available()
    if config.device == "cuda" and not present:
        raise ModelError("device", "no CUDA device is usable", "set device to auto or cpu")
    return torch.device("cuda" if config.device != "cpu" and present else "cpu")


def _dtype(config: WorkerConfig, device: torch.device, kernels: Kernels | None) -> torch.dtype:
    """auto: bfloat16 where it is the faster one, as it is on the kernels of every target."""
    if config.dtype == "auto":
        fast = kernels is not None or computes_bfloat16(device)
        return torch.bfloat16 if fast else torch.float32
    if config.dtype == "float16" and device.type == "cpu":
        raise ModelError(
            "dtype", "float16 is not supported on a CPU", "set dtype to auto, bfloat16 or float32"
        )
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[config.dtype]


def _quantization(config: WorkerConfig) -> Quantization:
    if config.quantization == "fp8":
        raise ModelError(
            "quantization",
            "fp8 is not supported: no CPU computes in it, and there are no GPU kernels for it yet",
            "set quantization to none, int8 or int4",
        )
    if config.activation_quantization != "none" and config.quantization != "int8":
        raise ModelError(
            "activation_quantization",
            f"int8 activations cannot be multiplied with weights of quantization "
            f"{config.quantization}",
            "set quantization to int8, or activation_quantization to none",
        )
    return Quantization(config.quantization, config.activation_quantization)


def _check_length(config: WorkerConfig, model: ModelConfig) -> None:
    if config.max_model_len > model.context:
        raise ModelError(
            "max_model_len",
            f"{config.max_model_len} is beyond the model's {model.context} tokens",
            f"set it to at most {model.context}",
        )


def _num_blocks(config: WorkerConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
    block_bytes = token_bytes * config.block_size
    needed = -(-config.max_model_len // config.block_size)
    blocks = config.kv_cache_memory // block_bytes
    if blocks < needed:
        raise ModelError(
            "kv_cache_memory",
            f"{config.kv_cache_memory} bytes cannot hold one sequence of max_model_len "
            f"{config.max_model_len} tokens",
            f"set it to at least {needed * block_bytes}, or lower max_model_len",
        )
    return blocks


def _check_memory(config: WorkerConfig, weights: Footprint, device: torch.device) -> None:
    """The cache comes when the weights are in place, and may have what reading them took."""
    free = free_memory(device)
    if free is None:
        return
    if weights.resident + config.kv_cache_memory > free:
        raise ModelError(
            "kv_cache_memory",
            f"{config.kv_cache_memory} bytes and {weights.resident} bytes of weights exceed the "
            f"{free} bytes free on {device.type}",
            "lower kv_cache_memory or use a smaller model",
        )
    if weights.loading > free:
        raise ModelError(
            "model",
            f"reading its weights takes {weights.loading} bytes, more than the {free} bytes free "
            f"on {device.type}",
            "free memory or use a smaller model",
        )


def _layout(
    config: WorkerConfig, source: ModelSource, dtype: torch.dtype, quantization: Quantization
) -> pb.KvLayout:
    return pb.KvLayout(
        model_fingerprint=source.fingerprint,
        dtype=str(dtype).removeprefix("torch."),
        num_layers=source.config.num_layers,
        num_kv_heads=source.config.num_kv_heads,
        head_dim=source.config.head_dim,
        block_size=config.block_size,
        quantization=quantization.label,
        tensor_parallel=1,
    )
