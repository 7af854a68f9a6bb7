"""OpenAI's API as values: request bodies in, answers out; no network, no clock, nothing kept.

line of a Batch file ──read_line──> BatchLine ──┐
body ──parse──────────────────────────────────> ParsedRequest ──TurnRequest──> turn ──┐
                                                                                      │
line of the output  <──answer_line──  body  <──answer──  ReplyTokens <────────────────┘
"""
