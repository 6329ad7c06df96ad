"""From plain texts to batches of tokens: gathered, split, without doubles, tokenised and packed."""
