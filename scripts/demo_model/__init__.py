"""Making the small model that ships with the package: its data, its dialogues, its training."""
