"""How the embedded world is made: its grammar, and the training of its policy and its reward model."""
