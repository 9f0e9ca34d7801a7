"""Guesses of what sequences will generate next: who makes them, how good they are, and how many a step checks."""
