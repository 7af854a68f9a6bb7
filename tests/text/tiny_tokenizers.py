"""Tiny tokenizers, trained on a few lines: byte-level, or like Llama 2's."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

CORPUS = [
    "Hello there, how are you today? The weather in Oslo is fine and the rain is over.",
    "user assistant system tool ipython model thinking answer because I should say yes",
    'function name arguments {"name": "get_weather", "parameters": {"city": "Oslo"}}',
    "Grüße, 日本語, мир, 😀 und noch mehr\n\n    indented\n",
    "# Tools\n\nYou may call one or more functions to assist with the user query.",
]


def byte_level_library(
    special: Sequence[str] = (), plain: Sequence[str] = (), rstrip: Sequence[str] = ()
) -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False, rstrip=text in rstrip)
            for text in special
        ]
    )
    library.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return library


def sentencepiece_library(
    special: Sequence[str] = (), *, prepend_scheme: str | None = None
) -> Library:
    """Return a tokenizer like Llama 2's: spaces are "▁", bytes are the fallback, a text begins with a space.

    With `prepend_scheme`, it is like newer conversions, where the pre-tokenizer adds that space.
    """
    alphabet = sorted(set("".join(CORPUS[:3])) | {"▁"})
    vocab = {text: i for i, text in enumerate(["<unk>", *special])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for character in alphabet:
        vocab.setdefault(character, len(vocab))
    merges = [
        ("▁", "H"),
        ("e", "l"),
        ("▁H", "el"),
        ("▁Hel", "l"),
        ("▁Hell", "o"),
        ("▁", "t"),
        ("h", "e"),
    ]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    library = Library(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if prepend_scheme is None:
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme=prepend_scheme, split=False
        )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", *special)]
    )
    return library
