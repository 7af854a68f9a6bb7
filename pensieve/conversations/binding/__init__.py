"""Match requests that bring a full history to stored conversations."""
