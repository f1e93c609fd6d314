"""Solutions of notebook 09. Try first: `check` gives a hint for the mistakes that many make."""


# %% 09-1
def my_goodput(requests, ttft, tpot):
    met = judged = 0
    for request in requests:
        if request["failure"] or request["ttft"] > ttft:
            judged += 1
        elif request["tpot"] is not None:
            judged += 1
            met += request["tpot"] <= tpot
    return met / judged


# %% 09-2
def my_find_flaw(times, report):
    def near(a, b):
        return abs(a - b) < 1e-6

    tokens = times["tokens"]
    span = tokens[-1] - tokens[0]
    if not near(report["ttft"], tokens[0] - times["scheduled"]):
        return "clock started late"
    if near(report["tpot"], span / (len(tokens) - 1)):
        return "none"
    arrivals = [when for when, _ in times["chunks"]]
    if near(report["tpot"], (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)):
        return "chunks counted as tokens"
    return "divided by N"


# %% 09-3
def my_pooled(replicas, p):
    values = sorted(value for replica in replicas for value in replica)
    rank = p / 100 * (len(values) - 1)
    low = int(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (rank - low)
