"""Text as tokens: sources, tokenizers, the token store, and batches of packed documents; shared by tasks on text."""
