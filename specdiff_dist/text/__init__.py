"""Text to token ids and back: `tokenizers` and `jinja2` alone, so the router needs no transformers."""

from specdiff_dist.text.detokenizer import Detokenizer
from specdiff_dist.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
