"""The model as `transformers` runs it: the independent reference for exactness, and the
Hugging Face folder that other engines load.

GGUF files go through transformers' own converter, so that a mistake in our loader cannot
hide in the reference too.
"""

import importlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvasir.worker.model.source import locate, open_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


class MissingReferenceError(RuntimeError):
    """`transformers` is not installed."""


class Reference:
    """Greedy decoding in float32, one prompt at a time, without padding or batching."""

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast") -> None:
        self._model = model
        self._tokenizer = tokenizer
        # Nothing ends an answer early; the servers under test are told ignore_eos.
        model.generation_config.eos_token_id = None

    @property
    def kv_bytes_per_token(self) -> int:
        """float32 keys and values of one token in all layers."""
        config = self._model.config
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        values = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
        return int(values) * torch.float32.itemsize

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``, without any special token added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def tokenizer_json(self) -> bytes:
        """The tokenizer as the file that the `tokenizers` library reads."""
        return str(self._tokenizer.backend_tokenizer.to_str()).encode()

    @torch.inference_mode()
    def greedy(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """What ``generate`` answers: exactly ``max_tokens`` token ids."""
        prompt = torch.tensor([prompt_ids])
        output: torch.Tensor = self._model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_tokens,
        )
        return [int(token) for token in output[0, len(prompt_ids) :]]

    @torch.inference_mode()
    def next_logits(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
        """Logits from which each output token would be drawn, given all before it.

        Returns:
            float32 tensor [len(output_ids), vocabulary].
        """
        known = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        logits: torch.Tensor = self._model(known).logits[0, len(prompt_ids) - 1 :]
        return logits.float()


def load_reference(url: str) -> Reference:
    """The model of a worker's ``model`` setting. ModelError if it cannot be found."""
    return Reference(*_load(locate(url)))


def huggingface_folder(url: str, cache: Path) -> Path:
    """The model as a folder in Hugging Face layout, float32; converted once into ``cache``."""
    path = locate(url)
    if path.is_dir():
        return path
    folder = cache / f"{path.stem}-{open_source(url).fingerprint[:16]}"
    if folder.is_dir():
        return folder
    model, tokenizer = _load(path)
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{path.stem}-", dir=cache))
    try:
        with redirect_stderr(StringIO()):  # its progress bar
            model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _load(path: Path) -> tuple[Any, Any]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    try:
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise MissingReferenceError(
            "this needs transformers, which is not installed: pip install transformers"
        ) from None
    auto_model, auto_tokenizer = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    if path.is_dir():
        model = auto_model.from_pretrained(path, dtype=torch.float32)
        return model.eval(), auto_tokenizer.from_pretrained(path)
    gguf: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    folder, file = str(path.parent), path.name
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=file)
    model = auto_model.from_config(config, dtype=torch.float32)
    # from_pretrained(gguf_file=...) would do this too, but it wants `accelerate`.
    with redirect_stderr(StringIO()):  # its progress bar
        checkpoint = gguf.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(checkpoint["tensors"], strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise RuntimeError(f"weights of {file} do not fit: {missing} missing, {unexpected} extra")
    model.tie_weights()
    return model.eval(), auto_tokenizer.from_pretrained(folder, gguf_file=file)
