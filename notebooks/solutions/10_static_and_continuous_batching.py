"""Solutions of notebook 10. Try first: `check` gives a hint for the mistakes that many make."""


# %% 10-1
def my_idle(lengths, slots):
    steps = sum(max(lengths[i:i + slots]) for i in range(0, len(lengths), slots))
    return slots * steps - sum(lengths)


# %% 10-2
def my_find_fault(arrives, steps, slots):
    begun, starved, admissions = set(), False, []
    for number, step in enumerate(steps):
        waiting = [name for name in arrives if arrives[name] <= number and name not in begun]
        new = [name for name in step if name not in begun]
        if set(new) != set(waiting[:len(new)]):
            return "last in, first out"
        left_waiting = len(step) < slots and len(new) < len(waiting)
        starved = starved or left_waiting
        if new:  # beside others, or with a slot left idle: no static scheduler does that
            admissions.append(len(new) < len(step) or left_waiting)
        begun.update(step)
    if not starved:
        return "none"
    return "leaks a slot" if any(admissions) else "static"


# %% 10-3
def my_mean_end(lengths, slots):
    free, ends = [0] * slots, []
    for length in sorted(lengths):  # the shortest first
        slot = free.index(min(free))
        free[slot] += length
        ends.append(free[slot])
    return sum(ends) / len(ends)
