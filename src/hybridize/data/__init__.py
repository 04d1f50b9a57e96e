"""Text and prompts: bundled public-domain books, user files, needle prompts."""
