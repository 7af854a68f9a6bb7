"""The built-in model's training data: generated dialogues, and questions to examine the model."""
