"""How the tiny chat model that ships with agentrl was made: `python -m examples.tiny_model.make OUT`."""
