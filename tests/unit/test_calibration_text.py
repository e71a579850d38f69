"""Windows of a text: whole, apart, and begun as the tokenizer begins every text."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from kvasir.worker.calibration.text import draw_windows, read_tokenizer
from kvasir.worker.model.errors import ModelError

TEXT = " ".join(f"w{i}" for i in range(1, 41))


def tokenizer() -> Tokenizer:
    """Of a model that was trained on batches of four tokens; 0 begins a text, 41 ends it."""
    vocab = {f"w{i}": i for i in range(1, 41)} | {"<s>": 0, "</s>": 41}
    made = Tokenizer(models.WordLevel(vocab))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 0), ("</s>", 41)]
    )
    made.enable_truncation(4)
    made.enable_padding(length=8)
    return read_tokenizer(made.to_str().encode())


def test_windows_do_not_overlap_and_each_begins_as_a_text_does() -> None:
    windows = draw_windows(tokenizer(), TEXT, count=8, size=6, seed=3)
    assert windows[:, 0].tolist() == [0] * 8
    parts = [tuple(row) for row in windows[:, 1:].tolist()]
    assert sorted(parts) == [tuple(range(first, first + 5)) for first in range(1, 41, 5)]


def test_special_tokens_in_a_text_are_of_the_text() -> None:
    windows = draw_windows(tokenizer(), f"<s> w1 </s> {TEXT}", count=1, size=44, seed=3)
    assert windows.tolist() == [[0, 0, 1, 41, *range(1, 41)]]


@pytest.mark.parametrize(("count", "size"), [(9, 6), (1, 42)])
def test_a_text_that_is_too_short_is_refused(count: int, size: int) -> None:
    with pytest.raises(ModelError, match=f"40 tokens are fewer than {count} windows of {size}"):
        draw_windows(tokenizer(), TEXT, count, size, seed=0)
