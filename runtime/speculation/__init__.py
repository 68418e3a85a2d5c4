"""Prompt-lookup speculation: what to guess, when guessing pays, and what of a guess stands."""
