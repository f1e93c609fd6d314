"""Solutions of notebook 08. Try first: `check` gives a hint for the mistakes that many make."""


# %% 08-1
def my_intensity(batch, weights, bytes_per_weight, token_bytes, context):
    flops = 2 * weights * batch
    read = weights * bytes_per_weight + batch * context * token_bytes
    return flops / read


# %% 08-2
def my_limit(step, machine):
    floors = {
        "bytes": step["bytes"] / machine["read"],
        "flops": step["flops"] / machine["flops"],
        "calls": step["calls"] * machine["call"],
    }
    longest = max(floors, key=floors.get)
    return "none" if step["seconds"] > 2 * floors[longest] else longest


# %% 08-3
def my_crossover_batch(weights, bytes_per_weight, token_bytes, context, read, flops):
    import math

    multiplying = 2 * weights / flops          # seconds that a request adds
    reading = context * token_bytes / read     # seconds that its cache adds
    if multiplying <= reading:
        return None
    return math.ceil(weights * bytes_per_weight / read / (multiplying - reading))
