"""Text as data: tokenizers, files of tokens, documents packed into rows, conversations, preference pairs, prompts."""
