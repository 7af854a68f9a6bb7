"""Anthropic's Messages API as values, without network and clock: bodies in (`parse`), answers out (`render`).

`parse` returns the same `ParsedRequest` as api/openai, so both APIs share the code that runs it.
"""
