"""The exercises, one module a notebook: reference solutions, cases, known mistakes with their hints."""
