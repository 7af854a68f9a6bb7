"""The gRPC servers, which translate between the wire and our values and check who may call."""
