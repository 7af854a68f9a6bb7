from typing import NamedTuple
from pensieve.text.parts import Part


class Thinking(NamedTuple):
    text: str


class Text(NamedTuple):
    text: str


class CallBegan(NamedTuple):
    index: int
    name: str


class CallArguments(NamedTuple):
    index: int
    text: str


Piece = Thinking | Text | CallBegan | CallArguments


class ReplyPieces:
    def __init__(self, style, tools):
        self.num_calls = 0

    def push(self, text, part):
        if not text:
            return []
        return [Thinking(text) if part is Part.THINKING else Text(text)]

    def end(self):
        return []
