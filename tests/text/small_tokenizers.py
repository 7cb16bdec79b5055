"""Small tokenizers of every family that the detokenizer tells apart."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<s>", "</s>"]
WORDS = ["h", "e", "l", "o", "w", "he", "ll", "a", "b", ".", ",", "é", "你"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def with_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Adds <s> and </s> (special) and a few added tokens that are not."""
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("two words", special=False)])
    backend.add_tokens([AddedToken("好的", special=False)])
    return backend


def byte_level(*pieces: bytes) -> tokenizers.Tokenizer:
    """GPT-2's kind: one token per byte, and one for each of `pieces`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + ["".join(LETTERS[byte] for byte in piece) for piece in pieces if len(piece) > 1]
    backend = tokenizers.Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return with_added_tokens(backend)


def _letters() -> dict[int, str]:
    """The letter that stands for each byte of UTF-8, found by encoding characters that have them all."""
    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters: dict[int, str] = {}
    for character in map(
        chr, [*range(0x800), *range(0x800, 0xD800, 0x800), 0xE000, 0xF000, *range(0x10000, 0x110000, 0x10000)]
    ):
        shown = "".join(piece for piece, _ in step.pre_tokenize_str(character))
        letters.update(zip(character.encode(), shown, strict=True))
    return letters


LETTERS = _letters()


def fused_byte_level() -> tokenizers.Tokenizer:
    """Byte-level as a step of a sequence."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def llama(*, strips: bool = True) -> tokenizers.Tokenizer:
    """SentencePiece with byte fallback, as in Llama 2 and Mistral (strips one leading space) or Gemma (does not)."""
    backend = _spaced_bpe([*BYTES, "▁", "▁▁"], byte_fallback=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return with_added_tokens(backend)


def metaspace() -> tokenizers.Tokenizer:
    """SentencePiece without byte fallback."""
    backend = _spaced_bpe(["▁", "▁▁"], byte_fallback=False)
    backend.decoder = decoders.Metaspace()
    return with_added_tokens(backend)


def wordpiece() -> tokenizers.Tokenizer:
    """BERT's kind: words are joined by spaces, `##` continues one, a space before punctuation goes."""
    tokens = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return with_added_tokens(backend)


def no_decoder() -> tokenizers.Tokenizer:
    """Tokens joined by spaces."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return with_added_tokens(backend)


def _spaced_bpe(first: list[str], *, byte_fallback: bool) -> tokenizers.Tokenizer:
    tokens = ["<unk>", *first, *WORDS, *(f"▁{word}" for word in WORDS)]
    merges = [("▁", "▁"), ("h", "e"), ("l", "l"), *(("▁", word) for word in WORDS)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


FAMILIES = {
    "byte-level": byte_level,
    "byte-level, fused": fused_byte_level,
    "llama": llama,
    "gemma": lambda: llama(strips=False),
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "none": no_decoder,
}
