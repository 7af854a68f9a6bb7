"""Tokens to text, one by one.

Each token is a string of bytes (`Tokenizer.piece`), so a reply is a stream of bytes, and what can be
released is whatever of it is complete UTF-8.  All releases and the flush together are
`Tokenizer.decode` of all the ids, whatever the ids are; special tokens and ids beyond the vocabulary
say nothing.  A push costs two lookups.
"""

from __future__ import annotations

import codecs

from pensieve.text.tokenizer import Tokenizer


class Detokeniser:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True

    def push(self, token_id: int) -> str:
        """The text that this token completes, often that of the token itself."""
        if self._tokenizer.is_silent(token_id):
            return ""
        piece = self._tokenizer.piece(token_id, first=self._first)
        self._first = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The reply is over: an incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
