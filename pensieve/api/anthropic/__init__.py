"""Anthropic's Messages API as pure functions: bodies in (`parse`), answers out (`render`).

`parse` returns the same `ParsedRequest` as api/openai, so both APIs share the code that runs it.
"""
