"""The making of the tiny vision model that ships with agentrl: `python -m examples.vision_model.make OUT`."""
