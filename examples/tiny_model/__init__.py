"""The making of the tiny chat model that ships with agentrl: `python -m examples.tiny_model.make OUT`."""
