"""Tiny models whose tokenizer reads words, and texts for them that follow simple rules."""

from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, pre_tokenizers

from helpers.models import TINY_VOCAB, save_tiny


def save_worded(kind: str, folder: Path) -> None:
    """As ``save_tiny``; text is w0 to w159, with spaces between them."""
    save_tiny(kind, folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()  # of a kind that routers serve
    tokenizer.save(path)


def word_ids(count: int, seed: int) -> list[int]:
    """Ids of a text of few frequent words and many rare ones."""
    random = Random(seed)
    return [min(int(random.expovariate(0.05)), TINY_VOCAB - 1) for _ in range(count)]


def word_text(count: int, seed: int) -> str:
    return " ".join(f"w{word}" for word in word_ids(count, seed))
