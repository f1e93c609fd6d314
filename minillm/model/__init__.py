"""The decoder, its layers and kernels, and the files that weights come from."""
