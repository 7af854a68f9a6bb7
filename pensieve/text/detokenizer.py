"""Decode a reply one token at a time.

Each token stands for a string of bytes (`Tokenizer.piece`). Complete UTF-8 characters are released
immediately. For any ids, all released text together equals `Tokenizer.decode` of the ids. Special tokens and
ids beyond the vocabulary have no text. A push costs two lookups.
"""

from __future__ import annotations

import codecs

from pensieve.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one reply. Holds the bytes of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer, *, is_first: bool = True) -> None:
        """`is_first`: no text precedes the reply; some tokenizers then drop the first token's space."""
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = is_first

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, usually the text of this token."""
        if self._tokenizer.is_silent(token_id):
            return ""
        piece = self._tokenizer.piece(token_id, first=self._first)
        self._first = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """End the reply. Return U+FFFD if a character is incomplete, otherwise an empty string."""
        return self._utf8.decode(b"", final=True)
