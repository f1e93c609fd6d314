"""Who runs in this step, and how many tokens each: plain integers, no torch."""
