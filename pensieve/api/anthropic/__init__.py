"""Anthropic's Messages API as values, without network and clock: bodies in (`parse`), answers out (`render`).

`parse` makes the Request of api/openai, so what is behind it serves both APIs.
"""
