"""Conversations as clients see them: text in, text out, a history that is kept exactly."""
