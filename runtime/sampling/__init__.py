"""From logits to token ids: processors, penalties, grammars, log-probabilities, stateless noise."""
