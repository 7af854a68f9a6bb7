"""Models as cells: LSTM, sequence to sequence, TreeLSTM, and BART from transformers.

A cell computes `outputs = cell(payload, *states)` for a batch. `payload` has the token ids of the requests.
`states` are the outputs of each input node, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention

from pensieve.cells.graph import CellType, Graph, chain, tree

GO, EOS = 1, 2  # tokens of the sequence-to-sequence model
DECODED_BEYOND_SOURCE = 10  # a reply is at most this many tokens longer than its source
States = tuple[Tensor, ...]  # each with the batch as its first dimension


def rows_of(states: States, size: int) -> States:
    """Repeat the states of a batch of one `size` times."""
    return tuple(part.repeat(size, *[1] * (part.dim() - 1)) for part in states)


class Cell(nn.Module):
    """A cell type with its weights and shapes."""

    emits: int | None = None  # which output is a token of the reply
    pad = 0

    def __init__(self, kind: CellType, state: States, arity: int = 1, payload: int = 1) -> None:
        """`state`: one row of states, which a node without input nodes reads instead of outputs.

        A node has `arity` input nodes. It takes `payload` token ids from its request, padded by `pad`.
        """
        super().__init__()
        self.kind, self.arity, self.payload = kind, arity, payload
        self.initial = tuple(part.unsqueeze(0) for part in state)

    def to_device(self, device: torch.device) -> Cell:
        self.initial = tuple(part.to(device) for part in self.initial)
        return self.to(device)


@dataclass(frozen=True)
class Model:
    cells: dict[CellType, Cell]
    unfold: Callable[..., Graph]  # a request as cells
    eos: int | None = None  # the token that ends a reply. None: a reply is the last node's state


def _model(unfold: Callable[..., Graph], *cells: Cell, eos: int | None = None) -> Model:
    return Model({cell.kind: cell.eval().requires_grad_(False) for cell in cells}, unfold, eos)


class LSTMCell(Cell):
    """The state is (h, c, token). A decoder reads its previous token and emits the likeliest next token."""

    def __init__(self, kind: CellType, vocab: int, hidden: int, decodes: bool = False) -> None:
        state = torch.zeros(hidden), torch.zeros(hidden), torch.tensor(GO)
        super().__init__(kind, state, payload=0 if decodes else 1)
        self.embed, self.gates = nn.Embedding(vocab, hidden), nn.Linear(2 * hidden, 4 * hidden)
        self.words = nn.Linear(hidden, vocab) if decodes else None
        self.emits = 2 if decodes else None

    def forward(self, payload: Tensor, h: Tensor, c: Tensor, token: Tensor) -> States:
        word = payload[:, 0] if self.words is None else token
        i, f, g, o = self.gates(torch.cat((self.embed(word), h), 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, c, token if self.words is None else self.words(h).argmax(1)


def lstm(hidden: int = 256, vocab: int = 1000, batch_max: int = 64) -> Model:
    """A request is its tokens. The reply is the last state."""
    kind = CellType("lstm", 0, batch_max)

    def unfold(tokens: Sequence[int]) -> Graph:
        return chain((kind, [(token,) for token in tokens]))

    return _model(unfold, LSTMCell(kind, vocab, hidden))


def seq2seq(hidden: int = 256, vocab: int = 1000, batch_max: int = 64, eos: int = EOS) -> Model:
    """A request is its tokens, and optionally the maximum number of tokens of the reply."""
    encoder, decoder = CellType("encoder", 0, batch_max), CellType("decoder", 1, batch_max)

    def unfold(tokens: Sequence[int], reply_max: int | None = None) -> Graph:
        cap = reply_max or len(tokens) + DECODED_BEYOND_SOURCE
        return chain((encoder, [(token,) for token in tokens]), (decoder, [()] * cap))

    cells = LSTMCell(encoder, vocab, hidden), LSTMCell(decoder, vocab, hidden, decodes=True)
    return _model(unfold, *cells, eos=eos)


class LeafCell(Cell):
    def __init__(self, kind: CellType, vocab: int, hidden: int) -> None:
        super().__init__(kind, (), arity=0)
        self.embed, self.gates = nn.Embedding(vocab, hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, payload: Tensor) -> States:
        i, o, g = self.gates(self.embed(payload[:, 0])).chunk(3, 1)
        c = i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class InnerCell(Cell):
    """A node with two children, each of which has a forget gate of its own."""

    def __init__(self, kind: CellType, hidden: int) -> None:
        super().__init__(kind, (torch.zeros(hidden), torch.zeros(hidden)), arity=2, payload=0)
        self.gates = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, payload: Tensor, hl: Tensor, cl: Tensor, hr: Tensor, cr: Tensor) -> States:
        i, o, g, fl, fr = self.gates(torch.cat((hl, hr), 1)).chunk(5, 1)
        c = i.sigmoid() * g.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c


def tree_lstm(hidden: int = 256, vocab: int = 1000, batch_max: int = 64) -> Model:
    """A request is a binary tree: a token, or a pair of trees. Its reply is the state of the root."""
    leaf, inner = CellType("leaf", 0, batch_max), CellType("inner", 1, batch_max)
    cells = LeafCell(leaf, vocab, hidden), InnerCell(inner, hidden)
    return _model(partial(tree, leaf, inner), *cells)


class BartEncoderCell(Cell):
    """The whole encoder: a source of up to `payload` tokens is one node."""

    def __init__(self, kind: CellType, source_max: int, decoder: BartDecoderCell) -> None:
        super().__init__(kind, (), arity=0, payload=source_max)
        self.encoder, self.decoder = decoder.bart.model.encoder, decoder
        self.pad = decoder.bart.config.pad_token_id

    def forward(self, payload: Tensor) -> States:
        mask = payload != self.pad
        x = self.encoder.embed_tokens(payload) + self.encoder.embed_positions(payload)
        x = self.encoder.layernorm_embedding(x)
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -torch.inf)[:, None, None]
        for layer in self.encoder.layers:
            x = layer(x, bias)
        layers = self.decoder.bart.model.decoder.layers
        cross = torch.stack([_keys_and_values(layer.encoder_attn, x) for layer in layers], 1)
        token, position, _, _, own = rows_of(self.decoder.initial, len(payload))
        return token, position, mask, cross, own


class BartDecoderCell(Cell):
    """A decoder step. The state has the keys and values of the source, and of the reply until now.

    Each row has its own position, so rows of one batch may be at different steps.
    """

    emits = 0

    def __init__(self, kind: CellType, bart: Any, source_max: int, target_max: int) -> None:
        config = bart.config
        heads = config.decoder_attention_heads
        shape = [config.decoder_layers, 2, heads, 0, config.d_model // heads]
        token = torch.tensor(config.decoder_start_token_id)
        mask = torch.zeros(source_max, dtype=torch.bool)
        cross, own = (torch.zeros(*shape[:3], each, shape[4]) for each in (source_max, target_max))
        super().__init__(kind, (token, torch.tensor(0), mask, cross, own), payload=0)
        self.bart = bart

    def forward(self, payload: Tensor, *states: Tensor) -> States:
        token, position, mask, cross, own = states
        decoder, target_max = self.bart.model.decoder, own.shape[4]
        at = position.clamp(max=target_max - 1)  # padding rows count on beyond the last position
        places = decoder.embed_positions
        x = decoder.embed_tokens(token) + embedding(at + places.offset, places.weight)
        x = decoder.layernorm_embedding(x).unsqueeze(1)  # (rows, 1, d_model)
        past = torch.arange(target_max, device=at.device) <= at[:, None]
        kept = []
        for index, layer in enumerate(decoder.layers):
            new = _keys_and_values(layer.self_attn, x)
            kept.append(own[:, index].scatter(3, at.view(-1, 1, 1, 1, 1).expand_as(new), new))
            x = layer.self_attn_layer_norm(x + _attend(layer.self_attn, x, kept[-1], past))
            seen = _attend(layer.encoder_attn, x, cross[:, index], mask)
            x = layer.encoder_attn_layer_norm(x + seen)
            x = layer.final_layer_norm(x + layer.fc2(layer.activation_fn(layer.fc1(x))))
        logits = self.bart.lm_head(x[:, 0]) + self.bart.final_logits_bias
        return logits.argmax(1), position + 1, mask, cross, torch.stack(kept, 1)


def _keys_and_values(attention: Any, x: Tensor) -> Tensor:
    """Return (rows, 2, heads, tokens, head_dim)."""
    both: Any = torch.stack((attention.k_proj(x), attention.v_proj(x)), 1)
    heads: Tensor = both.unflatten(3, (attention.num_heads, -1)).transpose(2, 3)
    return heads


def _attend(attention: Any, x: Tensor, keys_and_values: Tensor, mask: Tensor) -> Tensor:
    query = attention.q_proj(x).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
    keys, values = keys_and_values.unbind(1)
    out = scaled_dot_product_attention(query, keys, values, mask[:, None, None])
    return attention.out_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def bart(whole: Any, source_max: int, target_max: int, batch_max: int = 32) -> Model:
    """Make cells of a `BartForConditionalGeneration`. A request is the token ids of its source."""
    encoder, decoder = CellType("encoder", 0, batch_max), CellType("decoder", 1, batch_max)
    step = BartDecoderCell(decoder, whole, source_max, target_max)

    def unfold(tokens: Sequence[int], reply_max: int = target_max) -> Graph:
        return chain((encoder, [tuple(tokens)]), (decoder, [()] * reply_max))

    first = BartEncoderCell(encoder, source_max, step)
    return _model(unfold, first, step, eos=whole.config.eos_token_id)
