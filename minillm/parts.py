"""Are the parts that a reader puts in place of minillm's own of the right kind? No torch."""

from __future__ import annotations


def check_part(name: str, part: object, protocol: type) -> None:
    """Refuse a part that lacks what its protocol names; what its methods do is for the course's batteries to prove.

    Args:
        name: what the part is given as, such as ``"sampler"``.
        protocol: a ``typing.Protocol``; its public names and ``__call__`` are what ``part`` must have.
    Raises:
        TypeError: naming what is missing, or saying that ``part`` is a class where one of its objects is meant.
    """
    wanted = [own for own in (*protocol.__annotations__, *vars(protocol)) if own == "__call__" or own[0] != "_"]
    if isinstance(part, type):
        raise TypeError(f"{name} must be an object; {part.__name__} is a class: make one, {part.__name__}(...)")
    missing = [own for own in wanted if not hasattr(part, own)]
    if missing:
        raise TypeError(f"{name} must be a {protocol.__name__} (see {protocol.__module__}): {part!r} lacks "
                        f"{', '.join(missing)}")
