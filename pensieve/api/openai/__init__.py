"""OpenAI's API as pure functions: request bodies in, answers out.

line of a Batch file ──read_line──> BatchLine ──┐
body ──parse──────────────────────────────────> ParsedRequest ──TurnRequest──> turn ──┐
                                                                                      │
line of the output  <──answer_line──  body  <──answer──  ReplyTokens <────────────────┘
"""
