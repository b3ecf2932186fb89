"""Engines: from prompts to sampled responses."""
