"""Servers: gRPC, and OpenAI's and Anthropic's APIs over HTTP. They parse requests and render replies."""
