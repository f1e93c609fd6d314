"""Solutions of notebook 15. Try first: `check` gives a hint for the mistakes that many make."""


# %% 15-1
def my_bits(inputs, bits, size, num_middles):
    groups = -(-inputs // (size or inputs))  # rounded up: the rest of a row is a group too
    num_bytes = -(-inputs * bits // 8) + groups * 2 * (1 + num_middles)
    return 8 * num_bytes / inputs


# %% 15-2
def my_find_fault(quantizer):
    # A small group, whose largest weight is 1, then a large one: 8, and 0.6 of its scale.
    rest = [0.0] * (quantizer.size - 2)
    row = quantizer([[1.0, 0.0, *rest, 8.0, 0.6, *rest]])[0]
    small, large, between = row[0], row[quantizer.size], row[quantizer.size + 1]
    if large < 0:
        return "wraps"
    if row[1]:  # its neighbour's code
        return "swapped"
    if large == 0.875:  # cut to 7 scales of the first group
        return "first group"
    if small == 1.0:  # one scale of the large group: not cut
        return "one scale"
    return "none" if between else "toward zero"


# %% 15-3
def my_factors(weight, inputs, most):
    from minillm.course.exercises.outlier import output_error

    # The column's largest weight and largest input, each to some power: large factors save the others' digits, small
    # ones those of a column that large inputs multiply. Which balance is best depends on both, so try. (SmoothQuant
    # has one power for both; AWQ tries, as here.)
    def widest(rows):
        return [max(map(abs, column)) or 1.0 for column in zip(*rows)]

    powers = [i / 8 for i in range(9)]
    tries = [[w**a / x**b for w, x in zip(widest(weight), widest(inputs))] for a in powers for b in powers]
    return min(tries, key=lambda factors: output_error(weight, inputs, factors))
