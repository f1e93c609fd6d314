"""Started with every Python of the emulation: what Colab does not have cannot be found here either."""

import os
import sys
from importlib.machinery import PathFinder

MISSING = frozenset(os.environ["MINILLM_COLAB_MISSING"].split())


class Preloaded(PathFinder):
    """The search of ``sys.path``, blind to the modules that are installed here and not on Colab."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in MISSING:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Preloaded
