"""The doors: gRPC, and the APIs of OpenAI and Anthropic over HTTP. They parse requests and render replies."""
