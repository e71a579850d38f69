"""Text and tokens: tokenizer, chat template, detokenizer, stop strings. No I/O, no HTTP."""
