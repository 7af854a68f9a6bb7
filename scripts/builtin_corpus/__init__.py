"""What the built-in model was trained on: dialogues that are made up, and questions to examine it with."""
