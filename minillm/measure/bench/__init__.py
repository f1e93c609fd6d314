"""What times things, and so may import torch: this machine, its kernels, a step's parts, and minillm beside others."""
