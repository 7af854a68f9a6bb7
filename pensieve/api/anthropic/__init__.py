"""Anthropic's Messages API as pure functions: parse request bodies (`parse`), render answers (`render`).

`parse` returns the same `ParsedRequest` as api/openai, so both APIs share the code that runs it.
"""
