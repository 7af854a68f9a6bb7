"""The servers: gRPC, and OpenAI's and Anthropic's APIs over HTTP."""
