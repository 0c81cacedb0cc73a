"""Synthetic dialogues."""
