"""A world to judge methods in: prompts that training has not seen, completions of ten to twenty tokens, many ways of being bad."""
