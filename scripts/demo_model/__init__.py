"""How the shipped demo model is made: its data and its questions."""
